"""Checkpoints of a training with compressed gradients, of all ranks: saved and resumed by ddp_train.py --folder.

    python examples/checkpoints.py run      # what the checkpoint in the folder `run` holds

The first rank saves the model and the optimizer, and every rank its residuals. A checkpoint counts from when the file
`latest` names it, so a rank may be killed at any time.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import narrowcast as nc


def save(folder: Path, step: int, model: Any, optimizer: Any, compression: nc.GradientCompression) -> None:
    """Write a checkpoint of all ranks, and forget the one before."""
    place = folder / f"step_{step}"
    place.mkdir(parents=True, exist_ok=True)
    torch.save(compression.state_dict(), place / f"gradients_{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(saved | {"ranks": dist.get_world_size()}, place / "model.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "next").write_text(place.name)
        (folder / "next").replace(folder / "latest")
        for old in {*folder.glob("step_*")} - {place}:
            shutil.rmtree(old, ignore_errors=True)


def resume(folder: Path, model: Any, optimizer: Any, compression: nc.GradientCompression) -> int:
    """Load the last checkpoint, if there is one; the step after which it was taken."""
    if not (folder / "latest").exists():
        return 0
    place, rank = folder / (folder / "latest").read_text(), dist.get_rank()
    saved = torch.load(place / "model.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    states = [torch.load(place / f"gradients_{each}.pt", weights_only=True) for each in range(saved["ranks"])]
    if len(states) == dist.get_world_size():
        compression.load_state_dict(states[rank])
    else:
        compression.load_state_dict(states, residuals="redistribute")
    if rank == 0:
        print(f"resumed after step {saved['step']}")
    return int(saved["step"])


def main(folder: Path) -> None:
    place = folder / (folder / "latest").read_text()
    saved = torch.load(place / "model.pt", map_location="cpu", weights_only=True)
    print(f"{place}: step {saved['step']}, {saved['ranks']} ranks, {len(saved['model'])} tensors of the model")
    for rank in range(saved["ranks"]):
        state = torch.load(place / f"gradients_{rank}.pt", map_location="cpu", weights_only=True)
        numel = sum(residual.numel() for residual in (*state["sender"].values(), *state["owner"].values()))
        print(f"rank {rank}: {state['codec']}, {numel} numbers of residuals")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
