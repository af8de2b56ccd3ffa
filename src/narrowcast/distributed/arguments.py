"""What collectives take, and the words in which they refuse the rest."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from narrowcast.codecs import Codec, checks
from narrowcast.codecs import codec as as_codec
from narrowcast.errors import CollectiveError, DtypeError, ShapeError, SpecError

MOST_TAG = (1 << 30) - 8
"""Tags of messages are below this: each takes two of gloo's, which are 31-bit numbers (transport/gloo.py)."""


def members(group: dist.ProcessGroup | None, op: str) -> dist.ProcessGroup | None:
    """The process group that `group` stands for; None where this rank is not in it."""
    if not dist.is_available() or not dist.is_initialized():
        raise CollectiveError(
            f"{op}: there is no process group yet. Call torch.distributed.init_process_group() first, and start the "
            "script with torchrun."
        )
    if group is not None and not isinstance(group, dist.ProcessGroup):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            return None
        raise ShapeError(f"group: {op} expected a ProcessGroup, got {type(group).__name__}.{_meant_as_codec(group)}")
    if c10d._rank_not_in_group(group):
        return None
    return group if group is not None else c10d._get_default_group()


def tensor(value: object, name: str) -> Tensor:
    """A dense float tensor, without its graph."""
    checks.float_rows(value, name)  # type: ignore[arg-type]
    assert isinstance(value, Tensor)
    return value.detach()


def tensors(values: object, name: str, count: int) -> list[Tensor]:
    """A list of as many tensors as there are ranks, of one dtype on one device."""
    if isinstance(values, Tensor) or not isinstance(values, Sequence):
        raise DtypeError(f"{name}: expected a list of tensors, one per rank, got {type(values).__name__}.")
    if len(values) != count:
        raise ShapeError(f"{name}: the group has {count} ranks, the list {len(values)} tensors. Pass one per rank.")
    checked = [tensor(value, f"{name}[{i}]") for i, value in enumerate(values)]
    for i, value in enumerate(checked):
        alike(checked[0], value, f"{name}[0]", f"{name}[{i}]")
    return checked


def alike(first: Tensor, second: Tensor, name: str, other: str) -> None:
    """The tensors of one call have one dtype and are on one device."""
    if first.dtype != second.dtype:
        raise DtypeError(f"{other} is {second.dtype}, {name} is {first.dtype}: convert one with .to().")
    if first.device != second.device:
        raise ShapeError(f"{other} is on {second.device}, {name} on {first.device}: move one with .to().")


def rows_alike(values: Sequence[Tensor], codec: Codec) -> None:
    """With block=row, tensors of one dimension are a row each; others have rows of the one length agreed on."""
    lengths = sorted({str(value.shape[-1]) if value.dim() > 1 else "all its" for value in values})
    if codec.block == "row" and len(lengths) > 1:
        raise ShapeError(
            f"codec={codec.spec!r}: each vector of the last dimension is a row, and the tensors of one call have rows "
            f"of {' and '.join(lengths)} elements. Give them one last dimension with .view()."
        )


def count(value: Tensor, numel: int, name: str, why: str) -> None:
    if value.numel() != numel:
        raise ShapeError(f"{name}: has {value.numel()} elements, needs {numel}: {why}.")


def reduction(op: object, size: int, name: str) -> tuple[str, int]:
    """The name of a reduction, and what its sum is divided by."""
    if op == dist.ReduceOp.SUM:
        return "sum", 1
    if op == dist.ReduceOp.AVG:
        return "avg", size
    others = (
        " Other reductions of quantized values have no bound on their error, or are exact on the original only: use "
        "torch.distributed for them."
    )
    raise SpecError(f"op={op!s}: {name} adds (ReduceOp.SUM) or averages (ReduceOp.AVG).{_meant_as_codec(op) or others}")


def _meant_as_codec(value: object) -> str:
    """A hint where a codec, which goes by keyword, stands in the place of another argument."""
    try:
        codec = as_codec(value)  # type: ignore[arg-type]
    except SpecError:
        return ""
    spec = codec.spec if value is codec else value
    return f" Did you mean codec={spec!r}?"


def splits(sizes: Sequence[int] | None, rows: int, ranks: int, name: str, of: str) -> list[int]:
    """How many of the `rows` of a tensor belong to each rank."""
    if sizes is None or len(sizes) == 0:
        if rows % ranks:
            raise ShapeError(
                f"{of}: its first dimension is {rows}, which {ranks} ranks cannot share evenly. Pass {name}=[...]."
            )
        return [rows // ranks] * ranks
    try:
        sizes = [operator.index(size) for size in sizes]
    except TypeError as error:
        raise ShapeError(f"{name}={list(sizes)}: split sizes are whole numbers.") from error
    if len(sizes) != ranks or min(sizes) < 0:
        raise ShapeError(f"{name}={sizes}: expected {ranks} sizes of zero or more, one per rank.")
    if sum(sizes) != rows:
        raise ShapeError(f"{name}={sizes}: adds up to {sum(sizes)}, but the first dimension of {of} is {rows}.")
    return sizes


def member(rank: object, group: dist.ProcessGroup, name: str) -> int:
    """The number in `group` of a global rank."""
    ranks = dist.get_process_group_ranks(group)
    if rank not in ranks:
        hint = _meant_as_codec(rank)
        raise ShapeError(f"{name}={rank!r}: not a rank of this group, which has the (global) ranks {ranks}.{hint}")
    return ranks.index(rank)


def one_of(rank: int | None, group_rank: int | None, group: dist.ProcessGroup, name: str, group_name: str) -> int:
    """The number in `group` of a rank given by its global number or by its number in the group."""
    if (rank is None) == (group_rank is None):
        raise ShapeError(f"{name}={rank!r}, {group_name}={group_rank!r}: give one of the two.")
    if group_rank is None:
        return member(rank, group, name)
    if not 0 <= group_rank < group.size():
        raise ShapeError(f"{group_name}={group_rank!r}: this group has ranks 0 to {group.size() - 1}.")
    return group_rank


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def in_common(tensor: Tensor, codec: Codec | None = None) -> str:
    """What every rank's tensors must have in common, in words; with block=row also the length of a row."""
    words = f"dtype={str(tensor.dtype).removeprefix('torch.')}"
    if codec is not None and codec.block == "row" and tensor.dim() > 1:
        words += f", row={tensor.shape[-1]}"
    return words


def message_tag(tag: object) -> int:
    if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag < MOST_TAG:
        raise ShapeError(f"tag={tag!r}: a tag is an integer of zero or more, below {MOST_TAG}.")
    return tag
