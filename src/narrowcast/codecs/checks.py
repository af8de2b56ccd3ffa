"""Checks of what codecs are given: dtypes, shapes, devices and seeds, each refused with a sentence that helps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from narrowcast.errors import DtypeError, PayloadError, ShapeError, SpecError

if TYPE_CHECKING:
    from narrowcast.codecs.base import Codec

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FLOAT_NAMES = "float32, bfloat16, float16 or float64"


def float_dtype(dtype: torch.dtype, argument: str) -> None:
    if dtype not in FLOATS:
        raise DtypeError(f"{argument}: codecs give {_FLOAT_NAMES}, not {dtype_name(dtype)}.")


def float_rows(x: Tensor, argument: str) -> None:
    if not isinstance(x, Tensor):
        raise DtypeError(f"{argument}: expected a torch.Tensor, got {type(x).__name__}. Try torch.as_tensor(...).")
    if x.dtype not in FLOATS:
        hint = "encode x.real and x.imag apart" if x.is_complex() else "pass x.float()"
        raise DtypeError(
            f"{argument}: codecs take {_FLOAT_NAMES}, not {dtype_name(x.dtype)}; "
            f"nothing is converted silently. If that is what you mean, {hint}."
        )
    if x.layout != torch.strided:
        raise DtypeError(f"{argument}: codecs take dense tensors, not {x.layout}. Pass x.to_dense().")
    if x.is_nested:
        raise DtypeError(f"{argument}: codecs take dense tensors, not nested ones. Pass the tensors of x.unbind().")
    refuse_dtensor(x, argument)


def refuse_dtensor(x: Tensor, argument: str) -> None:
    """Refuse a DTensor: only the caller knows whether the local shard or the full tensor is meant."""
    if type(x) not in (Tensor, Parameter) and any(kind.__name__ == "DTensor" for kind in type(x).__mro__):
        raise DtypeError(
            f"{argument}: is a DTensor, spread over ranks. Pass {argument}.to_local() for this rank's part of it, or "
            f"{argument}.full_tensor()."
        )


def byte_rows(rows: Tensor, codec: Codec, numel: int, argument: str) -> None:
    if not isinstance(rows, Tensor) or rows.dtype != torch.uint8:
        kind = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise DtypeError(f"{argument}: encoded rows are uint8, got {kind}. Pass what encode() returned.")
    expected = codec.row_bytes(numel)
    if rows.dim() == 0 or rows.shape[-1] != expected:
        width = rows.shape[-1] if rows.dim() else "no"
        raise PayloadError(
            f"{argument}: a row of {numel} elements takes {expected} bytes in codec {codec.spec!r}, but these rows "
            f"have {width}. The bytes were cut, or made with another codec or numel."
        )


def out(out: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    if not isinstance(out, Tensor) or out.dtype not in dtypes:
        kind = dtype_name(out.dtype) if isinstance(out, Tensor) else type(out).__name__
        raise DtypeError(f"out: expected {' or '.join(map(dtype_name, dtypes))}, got {kind}.")
    refuse_dtensor(out, "out")
    if out.shape != shape:
        raise ShapeError(f"out: expected shape {tuple(shape)}, got {tuple(out.shape)}; out is never resized.")
    if out.device != device:
        raise ShapeError(f"out: is on {out.device}, the input on {device}. Allocate out on {device}.")
    if out.requires_grad:
        raise ShapeError("out: requires grad, and decoding is not differentiable. Pass out.detach().")


def summands(
    rows: Tensor, codec: Codec, numel: int, own: Tensor | None, own_rank: int, divisor: int
) -> tuple[Tensor, Tensor | None]:
    """Check the arguments of a sum; returns `rows` and `own` as kernels take them."""
    byte_rows(rows, codec, numel, "rows")
    if rows.dim() != 2 or len(rows) == 0:
        raise ShapeError(f"rows: a sum takes [ranks, row_bytes] with at least one rank, got {tuple(rows.shape)}.")
    if not _is_integer(divisor) or divisor < 1:
        raise ShapeError(f"divisor={divisor!r}: a sum is divided by 1 (SUM) or the number of ranks (AVG).")
    if own is None:
        return plain(rows), None
    float_rows(own, "own")
    if tuple(own.shape) != (numel,) or own.device != rows.device:
        raise ShapeError(f"own: expected shape ({numel},) on {rows.device}, got {tuple(own.shape)} on {own.device}.")
    if not _is_integer(own_rank) or not 0 <= own_rank < len(rows):
        raise ShapeError(f"own_rank={own_rank!r}: rows has ranks 0 to {len(rows) - 1}.")
    return plain(rows), plain(own).contiguous()


def seed(seed: int | None) -> int:
    """A seed as the signed 64-bit integer that kernels take; a fresh one where there is none."""
    if seed is None:
        if torch.compiler.is_compiling():
            raise SpecError("seed: inside torch.compile a stochastic codec needs seed=, so that steps differ.")
        return int(torch.randint(0, 2**62, (), dtype=torch.int64, device="cpu"))
    if not _is_integer(seed):
        raise SpecError(f"seed={seed!r}: a seed is an integer, or None for a fresh one.")
    return (seed + 2**63) % 2**64 - 2**63


def as_matrix(rows: Tensor, argument: str) -> Tensor:
    """Rows [..., n] as a matrix, outside of autograd."""
    rows = plain(rows)
    dims = rows.dim()
    if dims == 2:
        return rows
    if dims == 1:
        return rows.unsqueeze(0)
    if dims == 0:
        raise ShapeError(f"{argument}: a row is a dimension, and a scalar has none. Pass x.reshape(1).")
    return rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])


def plain(tensor: Tensor) -> Tensor:
    """The tensor outside of autograd, with the negation of a negated view carried out."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor.resolve_neg() if negated(tensor) else tensor


def negated(tensor: Tensor) -> bool:
    """Whether the tensor is a negated view, whose memory holds the opposite. A compiler resolves these itself."""
    return not torch.compiler.is_compiling() and tensor.is_neg()


def unshared(out: Tensor, sources: Sequence[Tensor | None]) -> bool:
    """Whether a kernel may write into a contiguous `out` while it reads `sources`: they share no memory.

    They may be the very same elements, each of which is read before it is written: a sum may replace its own row.
    """
    if out.is_neg() or (type(out) is not Tensor and not isinstance(out, Parameter)):  # or memory of another kind
        return False
    first = out.data_ptr()
    end = first + out.nbytes
    for source in sources:
        if source is None:
            continue
        begin = source.data_ptr()
        if begin >= end or begin + (source.nbytes if source.is_contiguous() else _reach(source)) <= first:
            continue
        if begin != first or source.dtype != out.dtype or source.shape != out.shape:
            return False
    return True


def _reach(tensor: Tensor) -> int:
    """The bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def count(number: int, argument: str) -> None:
    if not _is_integer(number) or number < 0:
        raise ShapeError(f"{argument}={number!r}: a row holds zero or more elements, a whole number.")


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _is_integer(number: object) -> bool:
    return isinstance(number, (int, torch.SymInt)) and not isinstance(number, bool)


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`: a dtype as messages say it."""
    return str(dtype).removeprefix("torch.")


def describe(tensor: Tensor) -> str:
    """`float32 [2, 3]`: a tensor as messages say it."""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def gain(value: float) -> None:
    """How much it counts in a search that a block becomes smaller or larger as a whole."""
    if not 0 <= value < math.inf:
        raise SpecError(f"gain={value!r}: expected a number that is not negative, such as 0.0 or 4.0.")
