"""The ways to add up gradients that bench/training.py compares: a name each, and one function that sets any of them up.

`attach(method, model, warmup_steps, optimizer)` wraps a model in DDP and returns it with the state of its compression,
None where there is none. Every rank must call it alike. Competitors run as their authors meant them, as far as gloo
runs them:

- PowerSGD gets one bucket, since its hook mixes up the collectives of several. Its first tenth of the steps is plain,
  as its documentation suggests; "at once" starts it after two.
- PyTorch's per-tensor hook is written anew from its description (8 bits between the least and the largest value of a
  bucket, scales and codes gathered by everyone), as the original ends in an IndexError on gloo.
"""

# No `from __future__ import annotations`: DDP reads the annotations of a hook, and takes no strings.

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from narrowcast.distributed.gradients.meetings import LONGEST
from narrowcast.distributed.gradients.momentum import EXEMPT_IN
from training_torchft import TorchftDiLoCo

WARMUP = 0.2
"""The share of its steps that the 1-bit codec may train uncompressed."""
ONE_BUCKET = 1 << 14
"""Megabytes: more than any gradient here."""


@dataclass(frozen=True)
class Method:
    """One way to add up gradients."""

    name: str
    kind: str
    codec: str = ""
    error_feedback: bool = False
    rank: int = 0
    warmup: float = 0.0
    """The share of the steps that run uncompressed."""
    competitor: bool = False
    timed_as: str = ""
    """The method that takes as long for a step after the warm-up, where it is not timed itself."""
    warmup_as: str = "fp32"
    """The method that takes as long for a step of the warm-up."""
    residual_codec: str | None = None
    """What residuals are held in; None: fp32."""
    exact_vectors: bool = False
    """Whether exempt gradients travel in fp32 beside a momentum, too: what rounding them costs."""
    every: int = 0
    """Ranks train alone, and meet after so many steps, at the latest: their parameters are averaged."""
    sync_every: int | str = 0
    """How often, as `compress_gradients` has it; every multiple of `every` steps ends with a meeting."""
    outer: tuple[float, float] = (1.0, 0.0)
    """Learning rate and momentum of the step that follows the average."""
    meets_as: str = "int4+EF"
    """The method whose exchange takes as long as a meeting."""

    def warmup_steps(self, steps: int) -> int:
        if self.kind == "momentum":
            return max(1, round(self.warmup * steps))
        # PyTorch's PowerSGD with error feedback insists on two plain steps at the least.
        return max(2, round(self.warmup * steps)) if self.kind == "powersgd" else round(self.warmup * steps)


def _narrowcast(codec: str, error_feedback: bool, warmup: float = 0.0) -> Method:
    return Method(codec + ("+EF" if error_feedback else ""), "narrowcast", codec, error_feedback, warmup=warmup)


def _momentum(codec: str, warmup: float, warmup_as: str = "int8") -> Method:
    options = {"warmup": warmup, "warmup_as": warmup_as, "timed_as": f"momentum {codec}"}
    name = f"momentum {codec}" + (f" {warmup:.0%}" if warmup != WARMUP else "")
    name += "" if warmup_as == "int8" else f" after {warmup_as.removesuffix('+EF')}"
    return Method(name, "momentum", codec, True, **options)  # type: ignore[arg-type]


def _meeting(every: int | str, outer: tuple[float, float] = (1.0, 0.0)) -> Method:
    name = f"{'average' if outer == (1.0, 0.0) else 'DiLoCo'} {every}"
    most = every if isinstance(every, int) else LONGEST
    return Method(name, "local", "int4", True, every=most, sync_every=every, outer=outer)


METHODS = {
    method.name: method
    for method in (
        Method("fp32", "plain", competitor=True),
        Method("fp16 hook", "fp16", competitor=True),
        Method("PowerSGD 1", "powersgd", rank=1, warmup=0.1, competitor=True),
        Method("PowerSGD 2", "powersgd", rank=2, warmup=0.1, competitor=True),
        Method("PowerSGD 4", "powersgd", rank=4, warmup=0.1, competitor=True),
        Method("PowerSGD 4 at once", "powersgd", rank=4, competitor=True, timed_as="PowerSGD 4"),
        Method("per-tensor hook", "per_tensor", competitor=True),
        _narrowcast("int8", False),
        _narrowcast("int8", True),
        _narrowcast("int4", True),
        _narrowcast("int4", False),
        _narrowcast("int2", True),
        _narrowcast("int2", False),
        _narrowcast("sign", True, WARMUP),
        _narrowcast("sign", False, WARMUP),
        _momentum("sign", WARMUP),
        _momentum("sign", WARMUP, "int4+EF"),
        _momentum("sign", 0.1),
        _momentum("sign", 0.1, "int4+EF"),
        _momentum("sign", 0.1, "int2"),
        _momentum("sign", WARMUP, "int2"),
        _momentum("int2", WARMUP),
        replace(_momentum("sign", WARMUP), name="momentum sign residuals in int8", residual_codec="int8"),
        replace(
            _momentum("sign", 0.1, "int4+EF"), name="momentum sign 10% after int4 vectors in fp32", exact_vectors=True
        ),
        replace(_narrowcast("int4", True), name="int4+EF residuals in int8", residual_codec="int8"),
        _meeting(3),
        _meeting(5),
        _meeting(10),
        _meeting(30),
        _meeting("growing"),
        _meeting(10, (0.7, 0.9)),
        _meeting(30, (0.7, 0.9)),
        Method("torchft DiLoCo 30", "torchft", every=30, outer=(0.7, 0.9), meets_as="fp32", competitor=True),
        Method("auto", "narrowcast", "auto", True),
        Method("no exchange", "alone"),
    )
}


def attach(method: Method, model: nn.Module, warmup_steps: int, optimizer: nc.optim.AdamW) -> tuple[DDP, Any]:
    """The model in DDP, and the state of its compression. Models start alike by their seed: nothing is sent first."""
    if method.kind == "powersgd":
        ddp = DDP(model, init_sync=False, bucket_cap_mb=ONE_BUCKET)
        state: Any = PowerSGDState(None, matrix_approximation_rank=method.rank, start_powerSGD_iter=warmup_steps)
        ddp.register_comm_hook(state, powerSGD_hook)
        return ddp, state
    ddp = DDP(model, init_sync=False)
    if method.kind == "fp16":
        ddp.register_comm_hook(None, fp16_compress_hook)
    elif method.kind == "per_tensor":
        ddp.register_comm_hook(None, per_tensor_hook)
    elif method.kind == "momentum":
        warmup_codec = method.warmup_as.removesuffix("+EF")  # residuals wait for the momentum
        options = {"momentum": optimizer, "warmup_steps": warmup_steps, "warmup_codec": warmup_codec}
        options["residual_codec"] = method.residual_codec
        if method.exact_vectors:
            EXEMPT_IN.clear()  # of this process, which trains nothing else
        return ddp, nc.compress_gradients(ddp, method.codec, **options)
    elif method.kind == "narrowcast":
        options = {"error_feedback": method.error_feedback, "warmup_steps": warmup_steps}
        options["residual_codec"] = method.residual_codec
        return ddp, nc.compress_gradients(ddp, method.codec, **options)
    elif method.kind == "local":
        meetings = {"sync_every": method.sync_every, "outer_lr": method.outer[0], "outer_momentum": method.outer[1]}
        return ddp, nc.compress_gradients(ddp, method.codec, optimizer=optimizer, **meetings)
    elif method.kind == "torchft":
        return ddp, TorchftDiLoCo(model, optimizer, method.every, method.outer)
    return ddp, None


def per_tensor_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A bucket in 8 bits between its least and its largest value; everyone gathers all of them, and adds up."""
    values, world = bucket.buffer(), dist.get_world_size()
    low, high = values.min().clamp(max=0), values.max().clamp(min=0)
    step = ((high - low) / 255).clamp(min=torch.finfo(torch.float32).eps)  # the original's least step
    zero = (-low / step).round().clamp(0, 255)
    grids = [torch.empty(2) for _ in range(world)]
    dist.all_gather(grids, torch.stack([step, zero]))  # the original waits for these, too
    codes = (values / step).add_(zero).round_().clamp_(0, 255).to(torch.uint8)
    gathered = [torch.empty_like(codes) for _ in range(world)]
    work = dist.all_gather(gathered, codes, async_op=True)

    def add_up(_: object) -> Tensor:
        total = torch.zeros_like(values)
        for (step, zero), codes in zip(grids, gathered, strict=True):
            total += (codes.float() - zero) * step
        return total / world

    return work.get_future().then(add_up)


def tensors_in(state: object) -> list[Tensor]:
    """Every tensor that a compression keeps between steps, once: what it costs beside the model and its gradients."""
    tensors: dict[int, Tensor] = {}

    def look(value: object) -> None:
        if isinstance(value, Tensor):
            tensors[value.data_ptr()] = value
        elif isinstance(value, dict):
            for each in value.values():
                look(each)
        elif isinstance(value, list | tuple):
            for each in value:
                look(each)

    if isinstance(state, PowerSGDState):
        look([state.error_dict, state.p_memory_dict, state.q_memory_dict])
    elif state is not None:
        look(state.state_dict())
    return list(tensors.values())
