"""One rank of the DDP hooks that bench/compat.py compares: ours, and the protocol of PyTorch's quantization hooks."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as theirs

from narrowcast.compat import quantization_hooks as ours

CHANNEL = 512


class Bucket:
    """What a hook asks of a bucket."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def buffer(self) -> Tensor:
        return self.tensor


def gathered(mine: Tensor) -> list[Tensor]:
    tensors = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, mine)
    return tensors


def their_protocol(tensor: Tensor, channels: bool) -> Tensor:
    """PyTorch's hooks: gather scales, quantize, gather codes, and let everyone add up everything."""
    x, kind = tensor, torch.ao.quantization.MinMaxObserver
    to_codes, to_floats = theirs._quantize_per_tensor_backend, theirs._dequantize_per_tensor_backend
    if channels:
        x = F.pad(tensor, (0, CHANNEL - len(tensor) % CHANNEL)).view(-1, CHANNEL)
        kind = torch.ao.quantization.PerChannelMinMaxObserver
        to_codes, to_floats = theirs._quantize_per_channel_backend, theirs._dequantize_per_channel_backend
    observer = kind()
    observer(x)
    scale, zero = observer.calculate_qparams()
    both = gathered(torch.stack((scale, zero.float())))
    total = torch.zeros_like(x)
    for codes, (one_scale, one_zero) in zip(gathered(to_codes(x, scale, zero)), both, strict=True):
        total += to_floats(codes, one_scale, one_zero)
    return total.flatten()[: len(tensor)] / len(both)


def rank_main(rank: int, ranks: int, elements: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=ranks)
    torch.manual_seed(rank)
    gradient = torch.randn(elements) * 1e-3
    contenders: dict[str, Callable[[Tensor], object]] = {
        "fp32": lambda x: dist.all_reduce(x),
        "theirs per tensor": lambda x: their_protocol(x, False),
        "ours per tensor": lambda x: ours.quantization_pertensor_hook(None, Bucket(x)).wait(),  # type: ignore[arg-type]
        "theirs per channel": lambda x: their_protocol(x, True),
        "ours per channel": lambda x: ours.quantization_perchannel_hook(None, Bucket(x)).wait(),  # type: ignore[arg-type]
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, work in contenders.items():
            x = gradient.clone()
            dist.barrier()
            began = time.perf_counter()
            work(x)
            slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn:
                times[name].append(slowest.item())
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps({key: statistics.median(some) for key, some in times.items()}))
    dist.barrier()
    dist.destroy_process_group()
