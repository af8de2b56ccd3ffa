"""Collectives that return their result, and that gradients flow through.

`codec` is what the forward pass travels in, `backward_codec` (the same, unless given) what the gradients do. Inputs are
never changed.

**Which gradient.** Rank r has a loss L_r that depends on what it received. What `backward()` leaves on a rank is the
gradient of the sum of all ranks' losses, L_0 + L_1 + ..., with respect to that rank's input: the same that one process
holding all the ranks' tensors would get. (A mean over ranks is that sum divided by their number: divide the loss.)
Quantization counts as the identity: a gradient is that of the exact collective, which is a linear map, applied to
gradients that are themselves quantized on their way. Each of these maps is the transpose of another one here:

    all_gather           <->  reduce_scatter(SUM)
    reduce_scatter(AVG)   ->  all_gather of the gradient over N
    all_reduce(op)       <->  all_reduce(op)
    all_to_all_single    <->  all_to_all_single with the split sizes swapped

Backward calls the function that is written here, so gradients of gradients work, too.

**Who must take part.** The backward of a collective is a collective. Whether a tensor requires grad is known to its
own rank only, so no rank ever skips one on that ground: the tensor must require grad on all ranks or on none, and the
loss of every rank must depend on what it received, if only by adding `0 * result.sum()`. Where it does not, the ranks
that wait raise `CollectiveError` at the group's timeout. Several collectives must stand in the same order in the
graphs of all ranks.

**torch.compile.** A collective is a break in the compiled graph: what is before and after it is compiled, it runs as
it does without. With fullgraph=True, torch refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.codecs import checks
from narrowcast.codecs import codec as as_codec
from narrowcast.distributed import arguments, collectives
from narrowcast.distributed.collectives import SUM, AnyCodec
from narrowcast.distributed.encoder import derive_seed
from narrowcast.distributed.entry import collective
from narrowcast.errors import CollectiveError, ShapeError

_BACKWARD = 1
"""The word that tells the draws of a backward from those of its forward."""


@collective
def all_gather(
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    dim: int = 0,
    codec: AnyCodec = "int8",
    backward_codec: AnyCodec | None = None,
    seed: int | None = None,
) -> Tensor:
    """The tensors of all ranks, concatenated along `dim` in rank order: the same bits on every rank.

    Backward: reduce_scatter(SUM) of the gradient along `dim`.
    """
    members, back = _members(group, "all_gather"), _back(codec, backward_codec, seed)
    tensor = _with_dimension(tensor)
    dim = _dimension(tensor, dim)

    def forward(x: Tensor) -> Tensor:
        shape = list(x.shape)
        shape[dim] *= members.size()
        output = x.new_empty(shape)
        collectives.all_gather(output.tensor_split(members.size(), dim), x, members, codec=codec, seed=seed)
        return output

    def backward(grad: Tensor) -> Tensor:
        return reduce_scatter(grad, SUM, members, dim=dim, **back)

    return _apply(tensor, forward, backward)


@collective
def reduce_scatter(
    tensor: Tensor,
    op: Any = SUM,
    group: dist.ProcessGroup | None = None,
    *,
    dim: int = 0,
    codec: AnyCodec = "int8",
    backward_codec: AnyCodec | None = None,
    seed: int | None = None,
) -> Tensor:
    """Sum (or average) `tensor` over all ranks, and return this rank's part along `dim`. The sum is not quantized.

    Backward: all_gather of the gradient along `dim`; for an average, of the gradient divided by the number of ranks.
    """
    members, back = _members(group, "reduce_scatter"), _back(codec, backward_codec, seed)
    dim = _dimension(tensor, dim)
    size = members.size()
    _, divisor = arguments.reduction(op, size, "reduce_scatter")
    if tensor.shape[dim] % size:
        raise ShapeError(
            f"tensor: dimension {dim} is {tensor.shape[dim]}, which {size} ranks cannot share evenly. "
            "Pad it to a multiple of their number."
        )

    def forward(x: Tensor) -> Tensor:
        parts = x.tensor_split(size, dim)
        output = x.new_empty(parts[0].shape)
        collectives.reduce_scatter(output, parts, op, members, codec=codec, seed=seed)
        return output

    def backward(grad: Tensor) -> Tensor:
        share = grad if divisor == 1 else grad / divisor
        return all_gather(share, members, dim=dim, **back)

    return _apply(tensor, forward, backward)


@collective
def all_reduce(
    tensor: Tensor,
    op: Any = SUM,
    group: dist.ProcessGroup | None = None,
    *,
    codec: AnyCodec = "int8",
    backward_codec: AnyCodec | None = None,
    seed: int | None = None,
) -> Tensor:
    """The sum (or average) of `tensor` over all ranks: the same bits on every rank.

    Backward: all_reduce of the gradient with the same `op`. When every rank computes the same loss from the result,
    the sum of losses counts it N times; divide it by N, or reduce with AVG.
    """
    back = _back(codec, backward_codec, seed)
    _members(group, "all_reduce")
    arguments.tensor(tensor, "tensor")

    def forward(x: Tensor) -> Tensor:
        output = x.clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(output, op, group, codec=codec, seed=seed)
        return output

    def backward(grad: Tensor) -> Tensor:
        return all_reduce(grad, op, group, **back)

    return _apply(tensor, forward, backward)


@collective
def all_to_all_single(
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    codec: AnyCodec = "int8",
    backward_codec: AnyCodec | None = None,
    seed: int | None = None,
) -> Tensor:
    """Split `tensor` along its first dimension, send a part to each rank, and return what came, concatenated.

    Without split sizes the parts are equal. What a rank sends to itself is exact. Backward: the same, back.
    """
    members, back = _members(group, "all_to_all_single"), _back(codec, backward_codec, seed)
    _dimension(tensor, 0)

    def forward(x: Tensor) -> Tensor:
        rows = sum(output_split_sizes) if output_split_sizes else len(x)
        output = x.new_empty(rows, *x.shape[1:])
        splits = output_split_sizes, input_split_sizes
        collectives.all_to_all_single(output, x, *splits, members, codec=codec, seed=seed)
        return output

    def backward(grad: Tensor) -> Tensor:
        splits = input_split_sizes, output_split_sizes
        return all_to_all_single(grad, *splits, members, **back)

    return _apply(tensor, forward, backward)


class _LinearMap(torch.autograd.Function):
    """A linear map across ranks, and its transpose."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.transpose = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(grad), None, None


def _apply(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    return _LinearMap.apply(x, forward, backward)  # type: ignore[no-any-return]


def _back(codec: AnyCodec, backward_codec: AnyCodec | None, seed: int | None) -> dict[str, Any]:
    """How the backward is called: what travels forth there travels back here."""
    back = as_codec(codec if backward_codec is None else backward_codec)
    apart = None if seed is None else derive_seed(checks.seed(seed), _BACKWARD)
    return {"codec": back, "backward_codec": codec, "seed": apart}


def _members(group: dist.ProcessGroup | None, op: str) -> dist.ProcessGroup:
    members = arguments.members(group, op)
    if members is None:
        raise CollectiveError(f"{op}: this rank is not in the group, so there is no result. Call it on members only.")
    return members


def _with_dimension(tensor: Tensor) -> Tensor:
    """A scalar counts as a vector of one element, where it is to be concatenated."""
    return tensor.reshape(1) if isinstance(tensor, Tensor) and tensor.dim() == 0 else tensor


def _dimension(tensor: Tensor, dim: int) -> int:
    arguments.tensor(tensor, "tensor")
    if not -tensor.dim() <= dim < tensor.dim():
        raise ShapeError(f"dim={dim}: tensor has {tensor.dim()} dimensions.")
    return dim % tensor.dim()
