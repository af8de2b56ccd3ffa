"""`narrowcast demo`: a small GPT learns from the standard library's source, three times, and is then quantized.

Two ranks over gloo train the same model from the same weights on the same batches: gradients in fp32, in int8, and in
4 bits with error feedback (`ranks.py`). The one that was trained in fp32 is then quantized. One table says what each
way costs and what it leaves (`report.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from narrowcast.cli.places import check_picture

if TYPE_CHECKING:
    from rich.progress import TaskID

WAYS = {"fp32": "fp32", "int8": "int8", "int4": "int4, error feedback"}
"""What gradients travel in, and what it is called."""

RANKS = 2


def demo(
    steps: Annotated[int, typer.Option(min=2, help="Steps of each of the three trainings.")] = 700,
    picture: Annotated[Path, typer.Option(help="Where to draw loss against megabytes sent.")] = Path("demo.png"),
) -> None:
    """Train a small GPT with gradients in fp32, int8 and 4 bits, quantize it, and show what each way costs and leaves.

    Takes about two minutes on two cores. Works offline, without a GPU and without root.

    Example: narrowcast demo
    """
    check_picture("--picture", picture)  # before the training: it takes minutes
    console = Console()
    console.print(
        f"A GPT of 0.5 million parameters reads the source of Python's standard library: {RANKS} ranks over gloo, "
        f"{steps} steps in each of {len(WAYS)} ways.\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        curves = _train(Path(folder), steps, console)
        from narrowcast.cli.demo import report

        report.show(Path(folder), curves, picture, console)


def _train(folder: Path, steps: int, console: Console) -> dict[str, list[dict[str, Any]]]:
    """What rank 0 said of each step, by way."""
    curves: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    if not console.is_terminal:  # where bars cannot move, lines say how far it is
        for said in _ranks(folder, steps):
            curves[said["way"]].append(said)
            if said["step"] % max(1, steps // 5) == 0:
                console.print(f"{WAYS[said['way']]}: step {said['step']} of {steps}, loss {said['loss']:.3f}")
        return curves
    columns = (
        TextColumn("{task.description:22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bars: dict[str, TaskID] = {
            way: progress.add_task(title, total=steps, loss="", start=False) for way, title in WAYS.items()
        }
        for said in _ranks(folder, steps):
            way = said["way"]
            if not curves[way]:
                progress.start_task(bars[way])
            curves[way].append(said)
            progress.update(bars[way], completed=said["step"], loss=f"loss {said['loss']:.3f}")
    return curves


def _ranks(folder: Path, steps: int) -> Iterator[dict[str, Any]]:
    """Start the ranks with torchrun, and give on what rank 0 says."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command = [*torchrun, "-m", "narrowcast.cli.demo.ranks", str(folder), str(steps), *WAYS]
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
    with (folder / "errors").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if process.wait():
            words = (folder / "errors").read_text()[-2000:]
            typer.echo(f"narrowcast demo: the ranks ended with exit code {process.returncode}:\n{words}", err=True)
            raise typer.Exit(1)
    finally:
        process.terminate()  # torchrun ends its ranks
        process.wait()
