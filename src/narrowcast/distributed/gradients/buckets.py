"""A flat bucket of several parameters: how it is cut for a reduction, what it would cost without a codec."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from narrowcast.distributed import arguments
from narrowcast.distributed.gradients.compression import GradientCompression
from narrowcast.distributed.gradients.error_feedback.outcome import Outcome
from narrowcast.distributed.gradients.error_feedback.residuals import Residuals
from narrowcast.distributed.gradients.hosted import HostBucket
from narrowcast.distributed.gradients.layout import ChunkLayout, Gradient, check_cover, lay_out
from narrowcast.distributed.gradients.options import reals_per_element
from narrowcast.distributed.gradients.reduction import Bucket, FlatBucket, Reduction
from narrowcast.distributed.protocols.mesh import Mesh
from narrowcast.distributed.transport.group import Group


def layout_of(
    state: GradientCompression,
    parameters: Sequence[Tensor],
    offsets: Sequence[int],
    total: int,
    group: Group | Mesh,
    all_exempt: bool,
) -> list[ChunkLayout]:
    """How a bucket of `total` elements with these parameters is cut."""
    key = (*map(id, parameters), *offsets, total, all_exempt)
    if key not in state.layouts:
        gradients = []
        for parameter, offset in zip(parameters, offsets, strict=True):
            name, numel = state.parameters.name_of(parameter), reals_per_element(parameter) * parameter.numel()
            exempt = all_exempt or state.parameters.is_exempt(name, numel, group.size)
            gradients.append(Gradient(name, offset, numel, exempt))
        check_cover(gradients, total)
        state.layouts[key] = chunks = lay_out(gradients, group.size, at_once=group.nccl)
        if isinstance(group, Mesh):
            for chunk in chunks:
                chunk.share_out(group.within.rank, group.within.size, group.between.size)
    return state.layouts[key]


def flat_bucket(
    reduction: Reduction,
    buffers: Sequence[Tensor],
    residuals: Residuals | None,
    outcome: Outcome,
    group: Group | Mesh,
) -> Bucket:
    """These flat buffers, end to end, as a reduction averages them in place."""
    first, *others = buffers
    fields = first, reduction.layout, residuals, outcome, reduction.probe
    if isinstance(group, Mesh):
        return HostBucket(*fields, group, exempt_in=reduction.exempt_in, also=others)
    return FlatBucket(*fields, exempt_in=reduction.exempt_in, also=others)


def plain_bytes_of(buffers: Sequence[Tensor], group: Group | Mesh) -> int:
    """What a rank sends of these without a codec: in a ring; where ranks share hosts, to other hosts."""
    hosts, places = (group.between.size, group.within.size) if isinstance(group, Mesh) else (group.size, 1)
    return 2 * sum(map(arguments.nbytes, buffers)) * (hosts - 1) // (hosts * places)
