"""`torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks`: gradients averaged as uint8.

    ddp_model.register_comm_hook(process_group, quantization_perchannel_hook)     # None: the default group

Both hooks return a future of the bucket, averaged over the ranks, in its own memory and dtype. They are
`narrowcast.distributed.all_reduce` with an affine codec of 8 bits, so N ranks send 2(N-1)/N of the encoded bucket each
(PyTorch's send N-1 times all of it, and their scales apart), any number of buckets may be in flight, and every rank
ends with the same bits.

**Numbers.** A block of elements with the range [lo, hi], stretched to hold zero, has PyTorch's
scale = (hi - lo) / 255 and zero_point = round(-lo / scale), and x becomes round(x / scale) + zero_point. Dividing is
multiplying by a reciprocal here, so that scales may differ in the last bits, and a code by one where x / scale is
within rounding of a half. What differs on purpose:

- Scales are not held above 1.2e-7: gradients of 1e-8 keep 8 bits, too.
- An element is quantized twice, on its way to the rank that adds it up and on its way back, whatever the number of
  ranks; there PyTorch quantizes once. A rank's own part is added exact, and averages are formed in fp32.
- The tensor is cut into a part (or several) for each rank, and blocks start with the parts. So "per tensor" is per
  part: a range within PyTorch's, and never a coarser scale. Blocks of `bucket_size` start elsewhere than PyTorch's
  where a part's length is not a multiple of it.
- An infinity or NaN makes its own block NaN on all ranks, not the whole tensor.

For gradients in fewer bits, with error feedback, there is `narrowcast.compress_gradients`.

The functions that begin with an underscore are PyTorch's formulas with scales given, without a loop over channels:
computed in fp32 (fp64 for fp64), where PyTorch divides bf16 and fp16 in their own few bits.
"""

# No `from __future__ import annotations` here: DDP compares the annotations of a hook with the types themselves.

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType

from narrowcast import distributed as ncd
from narrowcast.codecs import Codec, checks
from narrowcast.codecs import codec as as_codec
from narrowcast.errors import CollectiveError, ShapeError, SpecError

LARGEST_BLOCK = 65536
"""Elements that share a scale at most."""

_TILE = 1 << 18
"""Elements that are converted at a time on a CPU, so that intermediate results stay in a core's cache."""


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a DDP bucket over the ranks in uint8, with one scale and zero point for each rank's part of it."""
    return _average(process_group, bucket, as_codec("int8:block=row,zero_point=true"))


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Average a DDP bucket over the ranks in uint8, with a scale and zero point for every `bucket_size` elements.

    To register another size than 512, wrap the hook in a `def` with DDP's two arguments: DDP does not take a
    `functools.partial`. Codecs have blocks of multiples of 8, up to 65536. Of other sizes the next smaller one is
    taken, and below 8 each `bucket_size` elements travel with zeros behind them: no scale is ever shared by more.
    """
    if isinstance(bucket_size, bool) or not isinstance(bucket_size, int) or bucket_size < 1:
        raise SpecError(f"bucket_size={bucket_size!r}: how many elements share a scale, a whole number from 1 on.")
    block = min(max(bucket_size // 8 * 8, 8), LARGEST_BLOCK)
    codec = as_codec({"name": "int8", "block": block, "zero_point": True})
    if bucket_size >= 8:
        return _average(process_group, bucket, codec)
    gradient = bucket.buffer()
    filled = F.pad(gradient, (0, -len(gradient) % bucket_size)).view(-1, bucket_size)
    blocks = F.pad(filled, (0, 8 - bucket_size)).flatten()

    def unfilled(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        averages = done.value()[0].view(-1, 8)[:, :bucket_size].reshape(-1)
        return gradient.copy_(averages[: len(gradient)])

    return _started(process_group, blocks, codec).get_future().then(unfilled)


def register_ddp_comm_hook(
    comm_hook_type: DDPCommHookType, model: nn.parallel.DistributedDataParallel, state: Any = None
) -> None:
    """PyTorch's function of this name, with these hooks for QUANTIZE_PER_TENSOR and QUANTIZE_PER_CHANNEL.

    For every other member of `DDPCommHookType` PyTorch's own hook is registered.
    """
    hook = _HOOKS.get(comm_hook_type)
    if hook is None:
        ddp_comm_hooks.register_ddp_comm_hook(comm_hook_type, model, state)
    else:
        model.register_comm_hook(state, hook)


_HOOKS = {
    DDPCommHookType.QUANTIZE_PER_TENSOR: quantization_pertensor_hook,
    DDPCommHookType.QUANTIZE_PER_CHANNEL: quantization_perchannel_hook,
}


def _average(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket, codec: Codec
) -> torch.futures.Future[torch.Tensor]:
    return _started(group, bucket.buffer(), codec).get_future().then(lambda done: done.value()[0])


def _started(group: dist.ProcessGroup | None, gradient: Tensor, codec: Codec) -> ncd.Work:
    work = ncd.all_reduce(gradient, dist.ReduceOp.AVG, group, async_op=True, codec=codec)
    if work is None:
        raise CollectiveError(
            "process_group: this rank is not in it, so it has no average to give to DDP. Register the hook with the "
            "process group of the model, or with None for the default one."
        )
    return work


# -- PyTorch's formulas, with scales given -----------------------------------------------------------------------------


def _get_allgather_out_list(all_gather_in_list: Tensor, world_size: int) -> list[Tensor]:
    """Zeros like a tensor, one for each rank: what torch.distributed.all_gather writes into."""
    return [torch.zeros_like(all_gather_in_list) for _ in range(world_size)]


def _quantize_per_tensor_backend(x: Tensor, scale: Tensor | float, zero_point: Tensor | float) -> Tensor:
    """round(x / scale) + zero_point, from 0 to 255, as uint8."""
    return _convert_tensor(_quantize, torch.uint8, x, scale, zero_point)


def _dequantize_per_tensor_backend(y: Tensor, scale: Tensor | float, zero_point: Tensor | float) -> Tensor:
    """scale * (y - zero_point), in fp32."""
    return _convert_tensor(_dequantize, torch.float32, y, scale, zero_point)


def _quantize_per_channel_backend(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """`_quantize_per_tensor_backend` of each x[i], with scale[i] and zero_point[i]."""
    return _convert_channels(_quantize, torch.uint8, x, "x", scale, zero_point)


def _dequantize_per_channel_backend(y: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """`_dequantize_per_tensor_backend` of each y[i], with scale[i] and zero_point[i]."""
    return _convert_channels(_dequantize, torch.float32, y, "y", scale, zero_point)


def _convert_tensor(
    convert: Callable[..., None], dtype: torch.dtype, x: Tensor, scale: Tensor | float, zero_point: Tensor | float
) -> Tensor:
    flat = x.detach().reshape(-1)
    out = torch.empty(flat.shape, dtype=dtype, device=x.device)
    for target, tile in _tiles(1, out, flat):
        convert(target, tile, _number(scale), _number(zero_point))
    return out.view(x.shape)


def _convert_channels(
    convert: Callable[..., None], dtype: torch.dtype, x: Tensor, name: str, scale: Tensor, zero_point: Tensor
) -> Tensor:
    if x.dim() == 0:
        raise ShapeError(f"{name}: channels are along the first dimension, and a scalar has none. Pass {name}.view(1).")
    for value, argument in ((scale, "scale"), (zero_point, "zero_point")):
        if value.numel() != len(x):
            raise ShapeError(
                f"{argument}: {name} has {len(x)} channels, {argument} {value.numel()}. Pass one for each."
            )
    rows = x.detach().reshape(len(x), math.prod(x.shape[1:]))
    out = torch.empty(rows.shape, dtype=dtype, device=x.device)
    for tiles in _tiles(rows.shape[1], out, rows, scale.float().view(-1, 1), zero_point.float().view(-1, 1)):
        convert(*tiles)
    return out.view(x.shape)


def _quantize(out: Tensor, x: Tensor, scale: Tensor | float, zero_point: Tensor | float) -> None:
    codes = (x.to(checks.at_least_float32(x.dtype)) / scale).round_().add_(zero_point).clamp_(0, 255)
    out.copy_(codes.to(torch.int16))  # straight from float to uint8, torch goes one element at a time


def _dequantize(out: Tensor, y: Tensor, scale: Tensor | float, zero_point: Tensor | float) -> None:
    torch.sub(y.float(), zero_point, out=out).mul_(scale)


def _tiles(numel: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one length, whose rows have `numel` elements, tile by tile; on a GPU all at once."""
    first = tensors[0]
    step = max(1, len(first) if first.is_cuda else _TILE // max(1, numel))
    return zip(*(torch.split(tensor, step) for tensor in tensors), strict=True)


def _number(value: Tensor | float) -> Tensor | float:
    """A scale that does not promote fp32: PyTorch's observers give a tensor of shape [1]."""
    return value.float().reshape(()) if isinstance(value, Tensor) else value
