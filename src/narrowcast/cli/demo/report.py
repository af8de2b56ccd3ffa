"""The results of the demo: a table, text that the model generates, and a figure."""

from __future__ import annotations

import copy
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

import narrowcast as nc
from narrowcast.byte_gpt import ByteGPT, batches, loss_of, stdlib_text
from narrowcast.checkpoint.files import new_file
from narrowcast.cli.demo.ranks import SHAPE
from narrowcast.cli.demo.ways import WAYS
from narrowcast.cli.shared import pictures
from narrowcast.cli.shared.tables import show_table

EVALUATED = 24
"""Batches of held-out text over which a loss is averaged."""
PROMPT = b"class Reader:\n    def __init__(self, "
WRITTEN = 240


def show(folder: Path, curves: dict[str, list[dict[str, Any]]], picture: Path, console: Console) -> None:
    """Print and draw everything, from the models in `folder` and the records of the ranks."""
    trained = {}
    for way in WAYS:
        trained[way] = ByteGPT(SHAPE)
        trained[way].load_state_dict(torch.load(folder / f"{way}.pt", weights_only=True))
    packed = {"fp32": trained["fp32"]}
    for codec in ("int8", "int4"):
        packed[codec] = copy.deepcopy(trained["fp32"])
        nc.quantize_(packed[codec], codec)
    show_table(_table(trained, curves, packed), console)
    written = packed["int4"].generate(PROMPT, WRITTEN, temperature=0.85)
    console.print("\nThe model in 4 bits continues a prompt:\n")
    console.print((PROMPT + written).decode(errors="replace"), style="green", highlight=False, markup=False)
    _draw(curves, picture, console)


def _table(trained: dict[str, ByteGPT], curves: dict[str, list[dict[str, Any]]], packed: dict[str, ByteGPT]) -> Table:
    """The loss and bytes of each training, then those of the fp32 model with quantized weights."""
    table = Table("", "loss", "MB", "ratio", "seconds")
    plain = curves["fp32"][-1]["sent"]
    for way, model in track(trained.items(), "evaluating", transient=True):
        last = curves[way][-1]
        cells = f"{_loss(model):.3f}", f"{last['sent'] / 1e6:.1f} sent", f"{plain / last['sent']:.1f}x"
        table.add_row(f"gradients in {WAYS[way]}", *cells, f"{last['seconds']:.1f}")
    table.add_section()
    whole = _megabytes(packed["fp32"])
    for codec, model in packed.items():
        size = _megabytes(model)
        table.add_row(f"then weights in {codec}", f"{_loss(model):.3f}", f"{size:.2f} held", f"{whole / size:.1f}x")
    table.caption = "Loss on held-out text in nats per byte. Times are over loopback; on a slow link, bytes decide."
    return table


@torch.no_grad()
def _loss(model: ByteGPT) -> float:
    text = batches(stdlib_text(held_out=True), model.config.context, 8, seed=1)
    losses = [loss_of(model.eval()(inputs), targets) for inputs, targets in islice(text, EVALUATED)]
    return torch.stack(losses).mean().item()


def _megabytes(model: nn.Module) -> float:
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())) / 1e6


def _draw(curves: dict[str, list[dict[str, Any]]], picture: Path, console: Console) -> None:
    """Draw loss against megabytes sent. The file appears when it is complete."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        console.print("\nFor the figure: pip install 'narrowcast[plot]'", highlight=False, markup=False)
        return
    figure, (axes,) = pictures.canvas()
    for way, words in WAYS.items():
        records = curves[way]
        losses = torch.tensor([record["loss"] for record in records], dtype=torch.float32, device="cpu")
        window = max(1, len(losses) // 20)
        smooth = losses.unfold(0, window, 1).mean(1).tolist()
        sent = [record["sent"] / 1e6 for record in records][window - 1 :]
        pictures.line(axes, sent, smooth, way)
        pictures.name_at(axes, (sent[-1], smooth[-1]), words, way, (-9, -9))
    axes.set_xscale("log")
    axes.set_xlabel("megabytes sent by a rank", color=pictures.INK)
    axes.set_ylabel("training loss, nats per byte", color=pictures.INK)
    pictures.plain_ticks(axes.xaxis)
    pictures.title(axes, "The same steps for fewer bytes")
    axes.margins(x=0.12, y=0.12)
    with new_file(picture) as file:
        figure.savefig(file, dpi=130, format=picture.suffix[1:].lower())
    console.print(f"\nLoss against megabytes sent: {picture}", highlight=False)
