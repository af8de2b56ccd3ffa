"""`narrowcast demo`: a small GPT learns from the standard library's source, three times, and is then quantized.

Two ranks over gloo train the same model from the same weights on the same batches: with gradients in fp32, in int8, and
in 4 bits with error feedback (`ranks.py`). The model of the fp32 training is then quantized. A table shows the bytes,
the time and the loss of each (`report.py`).
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

from narrowcast.cli.demo.ways import WAYS
from narrowcast.cli.shared.failing import FAILED, print_error
from narrowcast.cli.shared.places import check_picture

if TYPE_CHECKING:
    from rich.progress import TaskID

RANKS = 2


def demo(
    steps: Annotated[int, typer.Option(min=2, help="Steps of each of the three trainings.")] = 700,
    picture: Annotated[Path, typer.Option(help="The figure of loss against megabytes sent.")] = Path("demo.png"),
) -> None:
    """Train a small GPT with gradients in fp32, int8 and 4 bits, quantize it, and compare bytes, time and loss.

    It takes about two minutes on two cores. It needs no network, no GPU and no root.

    Example: narrowcast demo
    """
    check_picture("--picture", picture)  # before the training, which takes minutes
    console = Console()
    console.print(
        f"A GPT of 0.5 million parameters learns from the source of Python's standard library: {RANKS} ranks over "
        f"gloo, {len(WAYS)} trainings of {steps} steps.\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        curves = _train(Path(folder), steps, console)
        from narrowcast.cli.demo import report

        report.show(Path(folder), curves, picture, console)


def _train(folder: Path, steps: int, console: Console) -> dict[str, list[dict[str, Any]]]:
    """The records of each step that rank 0 prints, by the codec of the gradients."""
    curves: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    if not console.is_terminal:  # lines instead of bars
        for record in _run_ranks(folder, steps):
            curves[record["way"]].append(record)
            if record["step"] == 1 or record["step"] % max(1, steps // 5) == 0:
                console.print(f"{WAYS[record['way']]}: step {record['step']} of {steps}, loss {record['loss']:.3f}")
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
        for record in _run_ranks(folder, steps):
            way = record["way"]
            if not curves[way]:
                progress.start_task(bars[way])
            curves[way].append(record)
            progress.update(bars[way], completed=record["step"], loss=f"loss {record['loss']:.3f}")
    return curves


def _run_ranks(folder: Path, steps: int) -> Iterator[dict[str, Any]]:
    """Start the ranks with torchrun, and yield the records that rank 0 prints."""
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
            typer.echo((folder / "errors").read_text()[-2000:], err=True)
            print_error(f"the ranks ended with exit code {process.returncode}. What they said last is above.")
            raise typer.Exit(FAILED)
    finally:
        process.terminate()  # torchrun ends its ranks
        process.wait()
