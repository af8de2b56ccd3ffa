"""Which loss a search of scales should make least: one search, many losses, two models that learned for real.

    python bench/search_losses.py lm --weights lm0.pt lm1.pt ... [--windows 256] [--out FOLDER]   # a byte GPT, on a GPU
    python bench/search_losses.py minilm [--out FOLDER]       # the model of bench/quality.py, on a CPU or a GPU

The search here is plain torch and exhaustive (FACTORS of the nearest scale, then one fit), so that it tells of the loss
and not of the search. A loss of a block of weights w with errors e, and weights d of its elements, is

    sum d |e|^p  +  gain (sum d e w)^2 / sum d w^2,      d = energy(column)^-column |w|^magnitude

The second term is what the block's share of an output loses or gains as a whole: squared error alone makes it smaller.
Every setting is judged on several cuts into blocks (columns rolled by SHIFTS), because two roundings that are equally
good differ by chance. The language model is judged by the KL divergence of its predictions from those of the unrounded
model on held-out text, and by its perplexity; MiniLM by the cosine of its embeddings with the unrounded ones.
Nothing is drawn at random.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.byte_gpt import ByteGPT, batches, stdlib_text

PRIOR = 16
"""Rows of average energy that are added to a column's own: few rows tell little of a column."""
FACTORS = tuple(0.60 + 0.02 * step for step in range(28))
SHIFTS = (0, 32)
CODECS = ("int4:block=64", "int3:block=64", "nf4:block=64", "apot4:block=64")


class Loss(NamedTuple):
    """One way to weigh errors."""

    column: float = 0.0
    magnitude: float = 0.0
    gain: float = 0.0
    power: float = 2.0
    least: float = 0.0
    """The smallest factor of the nearest scale that is tried."""
    oracle: bool = False
    """Columns count by the mean squares of their inputs, which a search without data cannot know."""
    codes: str = "searched"
    """`nearest`: no search; `fitted`: nearest codes, and then the scale that fits them under this loss; `library`: what
    `Codec.encode_searched` makes of it, with its few candidates."""


LIBRARY = {
    f"library, column {column:g}, gain {gain:g}": Loss(column, gain=gain, codes="library")
    for column in (0, 0.5, 1)
    for gain in (0, 1, 4, 16)
}
EXHAUSTIVE = {
    "nearest": Loss(codes="nearest"),
    "nearest codes, gain": Loss(codes="fitted", gain=1e4),
    **{f"gain {gain:g}": Loss(gain=gain) for gain in (0, 1, 4, 16, 64)},
    **{f"column 1, gain {gain:g}": Loss(column=1, gain=gain) for gain in (0, 4, 16, 64)},
    **{f"column .5, gain {gain:g}": Loss(column=0.5, gain=gain) for gain in (0, 4, 16)},
    "column -1, gain 0": Loss(column=-1),
    **{f"magnitude {power:g}": Loss(magnitude=power) for power in (0.5, 1)},
    "column 1, magnitude 1": Loss(column=1, magnitude=1),
    **{f"power {power:g}": Loss(power=power) for power in (3, 4)},
    "column 1, power 3": Loss(column=1, power=3),
    "from 0.85": Loss(least=0.85),
    "column 1, from 0.85": Loss(column=1, least=0.85),
    **{f"oracle, gain {gain:g}": Loss(oracle=True, gain=gain) for gain in (0, 16)},
}
LOSSES = {**LIBRARY, **EXHAUSTIVE}
FEW = ("nearest", "gain 0", "gain 4", "gain 16", "column 1, gain 0", "column 1, gain 4", "column .5, gain 16")
"""The losses that are tried for the last two codecs."""


class Table(NamedTuple):
    """What codes stand for in units of the scale, ascending, and whether scales have a sign."""

    levels: Tensor
    signed: bool
    low: int = 0
    high: int = 0

    @classmethod
    def of(cls, spec: str, device: torch.device) -> Table:
        codec = nc.codec(spec)
        if hasattr(codec, "levels"):
            return cls(codec.levels.to(device), False)
        half = 2 ** (codec.format.bits - 1)
        return cls(torch.arange(-half, half, dtype=torch.float32, device=device), True, -half, half - 1)

    def units(self, ratio: Tensor) -> Tensor:
        if self.signed:
            return ratio.round().clamp(float(self.low), float(self.high))
        middles = (self.levels[1:] + self.levels[:-1]) / 2
        return self.levels[torch.bucketize(ratio, middles)]


def rounded(weight: Tensor, spec: str, table: Table, loss: Loss, shift: int, inputs: Tensor | None) -> Tensor:
    """`weight` [rows, columns] after a trip through codes and bf16 scales."""
    rolled, codec = weight.float().roll(shift, 1), nc.codec(spec)
    counts = _counts(rolled, loss, None if inputs is None else inputs.roll(shift))
    if loss.codes == "library":
        rows = codec.encode_searched(rolled, counts[0].contiguous(), loss.gain)
        return codec.decode(rows, rolled.shape[1]).roll(-shift, 1).to(weight.dtype)
    block = int(codec.block or 0)
    blocks, counts = rolled.reshape(-1, block), counts.reshape(-1, block)
    extreme = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    first = extreme.abs() / float(table.levels.abs().max())
    first = first * torch.where(extreme > 0, -1.0, 1.0) if table.signed else first
    energy = (counts * blocks * blocks).sum(1, keepdim=True)

    def tried(scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale = scale.bfloat16().float()
        scale = torch.where(scale.abs() < 1e-30, torch.full_like(scale, 1e-30), scale)
        units = table.units(blocks / scale)
        error = blocks - units * scale
        lost = (counts * error.abs() ** loss.power).sum(1, keepdim=True)
        if loss.gain:
            lost = lost + loss.gain * (counts * error * blocks).sum(1, keepdim=True) ** 2 / energy.clamp(min=1e-30)
        return scale, units, lost

    best = tried(first)
    if loss.codes == "searched":
        for factor in (factor for factor in FACTORS if factor >= loss.least):
            other = tried(first * factor)
            best = tuple(torch.where(other[2] < best[2], new, old) for new, old in zip(other, best, strict=True))  # type: ignore[assignment]
    if loss.codes != "nearest" and loss.power == 2:
        scale, units, lost = best
        along, square = ((counts * units * some).sum(1, keepdim=True) for some in (blocks, units))
        fit = along * (1 + loss.gain) / (square + loss.gain * along**2 / energy.clamp(min=1e-30))
        fit = torch.where(fit.isfinite(), fit, scale).bfloat16().float()
        if loss.codes == "fitted":
            best = fit, units, lost
        else:
            other = tried(fit)
            best = tuple(torch.where(other[2] < best[2], new, old) for new, old in zip(other, best, strict=True))  # type: ignore[assignment]
    return (best[0] * best[1]).view_as(rolled).roll(-shift, 1).to(weight.dtype)


def _counts(weight: Tensor, loss: Loss, inputs: Tensor | None) -> Tensor:
    """How much the squared error of each element counts."""
    counts = torch.ones_like(weight)
    if loss.column:
        energy = weight.double().square().sum(0)
        prior = energy.mean() * PRIOR / len(weight)
        counts = counts * ((energy.mean() + prior) / (energy + prior)).float() ** loss.column
    if loss.magnitude:
        counts = counts * weight.abs() ** loss.magnitude
    if loss.oracle and inputs is not None:
        counts = counts * (inputs + 1e-3 * inputs.mean())
    return counts


# -- models ------------------------------------------------------------------------------------------------------------


class Subject(NamedTuple):
    """A model, the weights that are rounded, the mean squares of their inputs, and what is said of it."""

    model: nn.Module
    weights: dict[str, Tensor]
    inputs: dict[str, Tensor]
    judge: Callable[[], dict[str, float]]


def mean_squares(model: nn.Module, run: Callable[[], object]) -> dict[str, Tensor]:
    """By the name of a linear layer's weight: the mean square of each of its inputs while `run` runs."""
    sums: dict[str, list[Tensor]] = {}

    def hook(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda _, given: sums.setdefault(name, []).append(given[0].float().square().flatten(0, -2).mean(0))

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    handles = [layer.register_forward_pre_hook(hook(f"{name}.weight")) for name, layer in layers]
    with torch.inference_mode():
        run()
    for handle in handles:
        handle.remove()
    return {name: torch.stack(parts).mean(0).clone() for name, parts in sums.items()}


def language_model(paths: list[Path], windows: int, device: torch.device) -> Subject:
    from language_model import SIZES, unpacked

    config = SIZES["full"]
    model = ByteGPT(config).eval()
    model.load_state_dict(unpacked(paths))
    model = model.to(device)
    text = stdlib_text(held_out=True)
    inputs = text[: windows * config.context].view(windows, config.context).long().to(device)
    targets = text[1 : windows * config.context + 1].view(windows, config.context).long().to(device)
    samples = next(batches(stdlib_text(), config.context, 32, seed=2))[0].to(device)
    squares = mean_squares(model, lambda: model(samples))

    @torch.inference_mode()
    def logits(start: int) -> Tensor:
        return model(inputs[start : start + 32]).float().log_softmax(-1)

    exact = [logits(start).half() for start in range(0, windows, 32)]

    def judge() -> dict[str, float]:
        away, surprise, before = 0.0, 0.0, 0.0
        for start, float_ones in zip(range(0, windows, 32), exact, strict=True):
            known, found, right = float_ones.float(), logits(start), targets[start : start + 32].unsqueeze(-1)
            away += float((known.exp() * (known - found)).sum())
            surprise -= float(found.gather(-1, right).sum())
            before -= float(known.gather(-1, right).sum())
        tokens = windows * config.context
        return {"KL": away / tokens, "perplexity": math.exp((surprise - before) / tokens) - 1}

    weights = {name: weight.data for name, weight in model.named_parameters() if weight.dim() == 2}
    weights = {name: weight for name, weight in weights.items() if not name.startswith(("symbols", "positions"))}
    return Subject(model, weights, squares, judge)


def minilm(device: torch.device, count: int) -> Subject:
    from quality import Judge, embed

    judging = Judge(count)
    model, exact = judging.model.to(device), judging.exact.to(device)
    tokens = [{name: value.to(device) for name, value in batch.items()} for batch in judging.tokens]
    squares = mean_squares(model, lambda: embed(model, tokens[:3]))
    weights = {name: weight.data for name, weight in model.named_parameters() if weight.dim() == 2}
    weights = {name: weight for name, weight in weights.items() if weight.shape[1] % 64 == 0}
    return Subject(model, weights, squares, lambda: {"cosine": float((embed(model, tokens) * exact).sum(1).mean())})


def correlations(subject: Subject) -> dict[str, float]:
    """Per kind of layer: how the logarithms of a column's energy and of its inputs' mean square go together."""
    kinds: dict[str, list[float]] = {}
    for name, squares in subject.inputs.items():
        energy = subject.weights[name].float().square().sum(0).log()
        pair = torch.stack([energy, squares.clamp(min=1e-12).log()])
        kinds.setdefault(".".join(part for part in name.split(".") if not part.isdigit()), []).append(
            float(torch.corrcoef(pair)[0, 1])
        )
    return {kind: sum(values) / len(values) for kind, values in kinds.items()}


def sweep(subject: Subject, codecs: list[str], losses: list[str], device: torch.device) -> list[dict[str, Any]]:
    rows = []
    kept = {name: weight.clone() for name, weight in subject.weights.items()}
    for spec in codecs:
        table = Table.of(spec, device)
        for name in losses:
            figures: dict[str, float] = {}
            for shift in SHIFTS:
                for key, weight in kept.items():
                    known = subject.inputs.get(key)
                    subject.weights[key].copy_(rounded(weight, spec, table, LOSSES[name], shift, known))
                for key, value in subject.judge().items():
                    figures[key] = figures.get(key, 0.0) + value / len(SHIFTS)
                    figures[f"{key} at {shift}"] = value
            rows.append({"codec": spec, "loss": name, **figures})
            print(spec, name, " ".join(f"{key} {value:.5f}" for key, value in figures.items()), flush=True)
    for key, weight in kept.items():
        subject.weights[key].copy_(weight)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["lm", "minilm"])
    parser.add_argument("--weights", type=Path, nargs="*", default=[], help="the packed language model")
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--sentences", type=int, default=120)
    parser.add_argument("--codecs", default=",".join(CODECS))
    parser.add_argument("--losses", default="", help="separated by semicolons; all of them unless given")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    if arguments.model == "lm":
        subject = language_model(arguments.weights, arguments.windows, device)
    else:
        subject = minilm(device, arguments.sentences)
    start = time.perf_counter()
    together = correlations(subject)
    print(json.dumps(together), flush=True)
    losses, codecs = [name for name in arguments.losses.split(";") if name], arguments.codecs.split(",")
    if losses:
        rows = sweep(subject, codecs, losses, device)
    else:
        rows = sweep(subject, codecs, ["nearest", *LIBRARY], device)
        rows += sweep(subject, codecs[:2], [name for name in EXHAUSTIVE if name != "nearest"], device)
        rows += sweep(subject, codecs[2:], [name for name in FEW if name != "nearest"], device)
    print(f"{time.perf_counter() - start:.0f} s", flush=True)
    if arguments.out:
        (arguments.out / f"search_losses-{arguments.model}.json").write_text(
            json.dumps({"correlations": together, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
