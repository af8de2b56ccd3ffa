"""The gradient states of all ranks in a trainer's checkpoint.

The state of a `GradientCompression` differs from rank to rank: a residual is what *this* rank wanted minus what it
sent. So a checkpoint that only the first rank writes cannot hold one state for all. There are two ways:

- Where a checkpoint is a folder, each rank writes its own file, as trainers do with random states: `save` and `load`.
  Nothing is sent, and each rank holds only its own state.
- Where it is one file, `gather` sends all states to the first rank, one tensor at a time. `pick` loads a rank's own.

Residuals are as large as the gradients, on every rank. `residuals=False` neither writes nor reads them, and so also
resumes with another number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from narrowcast.distributed import GradientCompression
from narrowcast.distributed.gradients.error_feedback.redistribution import without_residuals
from narrowcast.errors import MissingFileError, StateDictError

TENSORS = ("sender", "owner")


def state_of(compression: GradientCompression, residuals: bool) -> dict[str, Any]:
    """The state of this rank, as a checkpoint holds it."""
    return compression.state_dict() if residuals else without_residuals(compression.state_dict())


def save(compression: GradientCompression, folder: str | os.PathLike[str], residuals: bool, number: int = 0) -> None:
    """Write this rank's state into a checkpoint's folder; `number` tells models apart."""
    path = _path(folder, number, _rank())
    path.parent.mkdir(parents=True, exist_ok=True)  # the rank that creates it may come later
    part = path.with_suffix(".part")
    torch.save(state_of(compression, residuals), part)
    os.replace(part, path)


def load(compression: GradientCompression, folder: str | os.PathLike[str], residuals: bool, number: int = 0) -> None:
    """Load what this rank wrote. Without residuals any rank's file serves; without a file nothing is loaded."""
    path = _path(folder, number, _rank())
    if not residuals and not path.exists():
        path = _path(folder, number, 0)
        if not path.exists():
            return
    if not path.exists():
        raise MissingFileError(
            f"{path}: the checkpoint holds no gradient state of rank {_rank()}. It was saved without compression, or "
            "by fewer ranks. To resume from it without residuals, pass residuals=False."
        )
    _take(compression, torch.load(path, map_location="cpu", weights_only=True), residuals)


def gather(compression: GradientCompression, residuals: bool) -> list[dict[str, Any]]:
    """The states of all ranks, on the first rank; an empty list on the others. Every rank calls it."""
    state = state_of(compression, residuals)
    group: Any = compression.members or dist.group.WORLD
    ranks, rank = group.size(), group.rank()
    if ranks == 1:
        return [state]
    shapes = {part: {name: tuple(tensor.shape) for name, tensor in state[part].items()} for part in TENSORS}
    states: list[Any] | None = [None] * ranks if rank == 0 else None
    members = dist.get_process_group_ranks(group)
    dist.gather_object({**state, **shapes}, states, dst=members[0], group=group)
    # NCCL sends CUDA tensors only.
    device = torch.device("cpu" if torch.device("cpu") in group._device_types else "cuda")
    if states is None:
        for tensor in _tensors(state):
            dist.send(tensor.to(device).contiguous(), members[0], group)
        return []
    for other, global_rank in enumerate(members[1:], 1):
        for part in TENSORS:
            for name, shape in states[other][part].items():
                received = torch.empty(shape, dtype=torch.float32, device=device)
                if received.numel():
                    dist.recv(received, global_rank, group)
                states[other][part][name] = received.cpu()
    return [state, *states[1:]]


def pick(compression: GradientCompression, states: Sequence[Mapping[str, Any]], residuals: bool) -> None:
    """Load this rank's state out of those that `gather` returned."""
    rank, ranks = dist.get_rank(compression.members), dist.get_world_size(compression.members)
    if residuals and len(states) != ranks:
        raise StateDictError(_other_ranks(len(states), ranks))
    _take(compression, states[rank if len(states) == ranks else 0], residuals)


# -- helpers ----------------------------------------------------------------------------------------------------------


def _take(compression: GradientCompression, state: Mapping[str, Any], residuals: bool) -> None:
    current = compression.residuals
    if residuals and current is not None and state.get("ranks", 0) not in (0, current.holder.ranks):
        raise StateDictError(_other_ranks(state["ranks"], current.holder.ranks))
    compression.load_state_dict(state if residuals else without_residuals(state))


def _other_ranks(there: int, here: int) -> str:
    return (
        f"the checkpoint holds the gradient states of {there} ranks, and this run has {here}. Residuals belong to a "
        f"rank: run with {there} ranks, or pass residuals=False to resume without them."
    )


def _tensors(state: Mapping[str, Any]) -> list[torch.Tensor]:
    return [tensor for part in TENSORS for tensor in state[part].values() if tensor.numel()]


def _path(folder: str | os.PathLike[str], number: int, rank: int) -> Path:
    return Path(folder) / f"narrowcast_gradients_{number}_rank_{rank}.pt"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
