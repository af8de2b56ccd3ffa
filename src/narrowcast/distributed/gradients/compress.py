"""`compress_gradients`: the one line that a training script adds."""

from __future__ import annotations

import sys
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from narrowcast.distributed.collectives import AnyCodec
from narrowcast.distributed.gradients import ddp
from narrowcast.distributed.gradients.compression import GradientCompression
from narrowcast.distributed.gradients.meetings import Meetings, SyncEvery
from narrowcast.distributed.gradients.momentum import MomentumOptimizer
from narrowcast.distributed.gradients.options import Exempt, Mode, one_dimensional, optimizers_of
from narrowcast.distributed.gradients.timetable import Refresh, Schedule
from narrowcast.errors import ModelKindError, SpecError


def compress_gradients(
    model: nn.Module,
    codec: AnyCodec | None = "int8",
    *,
    error_feedback: Mode | None = None,
    warmup_steps: int = 0,
    schedule: Schedule | None = None,
    exempt: Exempt = one_dimensional,
    gather: AnyCodec | None = None,
    process_group: dist.ProcessGroup | DeviceMesh | None = None,
    seed: int | None = None,
    momentum: MomentumOptimizer | None = None,
    warmup_codec: AnyCodec | Literal["default"] | None = "default",
    refresh: Refresh = None,
    scaler: torch.amp.GradScaler | None = None,
    optimizer: object = None,
    residual_codec: AnyCodec | None = None,
    sync_every: SyncEvery | None = None,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.0,
) -> GradientCompression:
    """Compress the gradients of a DDP or FSDP2 model from the next backward on. Every rank calls it alike.

    `model` is a DistributedDataParallel, or what `fully_shard` was called on; then `gather` is the codec in which
    parameters are gathered. `process_group` is the model's own by default. Where that has all ranks, those of one host
    (as torchrun knows it) add up without loss, and the codec travels between hosts. A 2-D mesh (hosts x local) names
    hosts itself; with any other group they play no part. FSDP2 takes dist.group.WORLD, or a mesh of replicas x shards.
    `sync_every`: ranks train alone after the warm-up, and average how far their parameters have moved after so many
    steps of `optimizer` (or a list of all): a number, "growing", a list of lengths, a function of the step. `outer_lr`
    and `outer_momentum` are of the step after the average, as in DiLoCo. `sync()`, before saving, meets at once. The
    other arguments are those of `GradientCompression`, which is returned."""
    trainer, sharded = _trainer_of(model, momentum, gather, sync_every)
    state = GradientCompression(
        codec,
        error_feedback=error_feedback,
        warmup_steps=warmup_steps,
        schedule=schedule,
        exempt=exempt,
        process_group=process_group if sharded or process_group is not None else _group_of(trainer),
        model=trainer if sharded else trainer.module,
        seed=seed,
        momentum=momentum,
        warmup_codec=warmup_codec,
        refresh=refresh,
        scaler=scaler,
        optimizer=optimizer,
        residual_codec=residual_codec,
        meetings=meetings_of(sync_every, optimizer, momentum, warmup_steps, outer_lr, outer_momentum),
    )
    return _attach(trainer, state, sharded, gather)


def meetings_of(
    sync_every: SyncEvery | None,
    optimizer: object,
    momentum: object,
    warmup_steps: int,
    outer_lr: float,
    outer_momentum: float,
) -> Meetings | None:
    """What these arguments mean; None where gradients travel in every step."""
    if sync_every is None:
        for name, given, default in (("outer_lr", outer_lr, 1.0), ("outer_momentum", outer_momentum, 0.0)):
            if given != default:
                raise SpecError(
                    f"{name}={given!r}: it is of the step after a meeting. Pass sync_every=, or leave it out."
                )
        return None
    if momentum is not None:
        raise SpecError(
            f"momentum= with sync_every={sync_every!r}: the momentum travels in every step, and between meetings "
            "nothing does. Pass one of them; with sync_every= the optimizer goes by optimizer=."
        )
    return Meetings(sync_every, warmup_steps, optimizers_of(optimizer), outer_lr, outer_momentum)


def _trainer_of(model: nn.Module, momentum: object, gather: AnyCodec | None, sync_every: object) -> tuple[Any, bool]:
    """The DDP or FSDP2 model, and whether it is FSDP2's; refuses other models, and what one of the two cannot do."""
    trainer: Any = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    sharded = _sharded(trainer)
    if sharded and momentum is not None:
        raise SpecError(f"momentum: {_NO_MOMENTUM}")
    if sharded and sync_every is not None:
        raise SpecError(f"sync_every: {_NO_MEETINGS}")
    if not sharded:
        _check_ddp(model, trainer)
        if gather is not None:
            raise SpecError(f"gather={gather!r}: {_NO_GATHER}")
    return trainer, sharded


def _attach(trainer: Any, state: GradientCompression, sharded: bool, gather: AnyCodec | None) -> GradientCompression:
    if sharded:
        from narrowcast.distributed.gradients.fsdp import shards

        shards.attach(trainer, state, gather)
    else:
        ddp.attach(trainer, state)
    return state


_NO_MOMENTUM = (
    "under FSDP2 a rank holds the momentum of its shards alone, and to send its own it would need the momentum of the "
    "whole model. Use DistributedDataParallel, or leave momentum= out."
)
_NO_MEETINGS = (
    "under FSDP2 a rank holds a part of each parameter, and cannot train alone. Use DistributedDataParallel, or leave "
    "sync_every= out."
)
_NO_GATHER = (
    "DistributedDataParallel keeps all parameters on every rank and gathers none. Leave it out, or use fully_shard."
)


def _sharded(model: object) -> bool:
    """Whether FSDP2 shards something in a model. One who uses FSDP2 has imported it; nobody else should have to."""
    if "torch.distributed.fsdp" not in sys.modules or not isinstance(model, nn.Module):
        return False
    from torch.distributed.fsdp import FSDPModule

    return not isinstance(model, DistributedDataParallel) and any(isinstance(m, FSDPModule) for m in model.modules())


def _group_of(ddp: DistributedDataParallel) -> dist.ProcessGroup | None:
    """The group of a model; None where it is the default one."""
    group: Any = ddp.process_group
    return None if group is c10d._get_default_group() else group


def _check_ddp(model: object, trainer: object) -> None:
    if isinstance(trainer, DistributedDataParallel):
        return
    name = type(model).__name__
    if name == "FullyShardedDataParallel":
        raise ModelKindError(f"model: {name} is FSDP1, which has no place for a codec. Use fully_shard (FSDP2).")
    raise ModelKindError(
        f"model: {name} exchanges no gradients. Wrap it first: model = DistributedDataParallel(model), or "
        "fully_shard(model), then compress_gradients(model, ...)."
    )
