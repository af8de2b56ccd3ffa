"""What `narrowcast inspect` writes: a table, a summary, JSON, and a file of rules."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from narrowcast.cli.inspect.weights import Weight
from narrowcast.cli.shared.tables import show_table
from narrowcast.codecs import Codec, checks
from narrowcast.codecs.mix import Mix
from narrowcast.codecs.sensitivity import Statistics, decibels
from narrowcast.errors import CalibrationError


class Line(NamedTuple):
    """A weight and its measurement."""

    weight: Weight
    statistics: Statistics
    why_not: str | None
    """Why the weight takes no part in a mix; None where it does."""


def why_not(weight: Weight, statistics: Statistics, skipped: Sequence[re.Pattern[str]]) -> str | None:
    """Why a weight takes no part in a mix; None where it does."""
    if weight.codec is not None:
        return f"is {weight.codec.spec} already"
    if not statistics.numel:
        return "is empty"
    if not statistics.finite:
        return "holds a NaN or an infinity"
    matching = next((pattern.pattern for pattern in skipped if pattern.search(weight.module)), None)
    return f"--skip {matching}" if matching else None


def set_costs(lines: Sequence[Line], costs: Mapping[str, float]) -> None:
    """Let ratios be those of a model's output: what a squared error of each weight costs it, by the weight's name."""
    unknown = [line.weight.name for line in lines if line.why_not is None and line.weight.name not in costs]
    if unknown:
        raise CalibrationError(
            f"--data: the model that config.json names has no weight {unknown[0]!r} that can be quantized"
            f"{f' ({len(unknown)} such)' if len(unknown) > 1 else ''}. Leave them out with --skip, or inspect without "
            "--data."
        )
    for line in lines:
        line.statistics.cost = costs.get(line.weight.name)


def rules(lines: Sequence[Line], mix: Mix) -> str:
    """A rules file: every weight's codec, or false."""
    size = f"{mix.bits:.3f} bits per weight, mean SQNR {mix.sqnr:.2f} dB"
    text = [f"# Written by narrowcast inspect: {size}.", "# For narrowcast quantize --rules, and quantize_.", "[rules]"]
    for weight, _, reason in lines:
        if weight.codec is not None:
            continue
        spec = mix.codecs.get(weight.name) if reason is None else None
        # A JSON string is a TOML basic string; the expression matches this one module.
        key = json.dumps(f"^{re.escape(weight.module)}$", ensure_ascii=False)
        text.append(f"{key} = {json.dumps(spec) if spec else 'false'}")
    return "\n".join(text) + "\n"


def show(lines: Sequence[Line], others: int, codecs: Sequence[Codec], mix: Mix | None, rules_out: Path | None) -> None:
    """Print the table and the summary."""
    # Into a pipe, rich would assume 80 columns and fold every name.
    console = Console() if Console().is_terminal else Console(width=200)
    show_table(_table(lines, codecs, mix), console)
    console.print(f"{len(lines)} weights; {others} other tensors (norms, biases, integers) stay as they are.")
    if mix is not None:
        console.print(_summary(lines, mix, rules_out))


def _table(lines: Sequence[Line], codecs: Sequence[Codec], mix: Mix | None) -> Table:
    """Each weight's shape and range, its ratio in each codec, and the codec that was chosen."""
    columns = Table("weight", "shape", "dtype", "min", "max", "std", title=_title(lines))
    for codec in codecs:
        columns.add_column(codec.spec, justify="right")
    if mix is not None:
        columns.add_column("chosen")
    for weight, statistics, _ in lines:
        dtype = checks.dtype_name(weight.dtype)
        kind = dtype if weight.codec is None else f"{weight.codec.spec} of {dtype}"
        span = (f"{value:.3g}" for value in _span(statistics).values())
        ratios = [_number(statistics.sqnr(codec.spec)) if statistics.noise else "" for codec in codecs]
        chosen = [] if mix is None else [mix.codecs.get(weight.name, "as it is")]
        columns.add_row(weight.name, "x".join(map(str, weight.shape)), kind, *span, *ratios, *chosen)
    return columns


def _title(lines: Sequence[Line]) -> str:
    on_data = any(line.statistics.cost is not None for line in lines)
    return "Output over the error that a weight adds to it, in dB, by codec" if on_data else "SQNR in dB, by codec"


def _summary(lines: Sequence[Line], mix: Mix, rules_out: Path | None) -> str:
    """The mix beside the best that any mix could be, and beside the best single codec; what was left out, and why."""
    best = "no mix of these codecs does better" if mix.exact else f"no mix exceeds {decibels(mix.bound):.2f} dB"
    text = [f"Best mix: {mix.bits:.3f} bits per weight, mean SQNR {mix.sqnr:.2f} dB; {best}."]
    if mix.single is not None:
        one = mix.single
        text.append(f"Best single codec: {one.codec}, {one.bits:.3f} bits per weight, mean SQNR {one.sqnr:.2f} dB.")
    else:
        text.append("No single codec is within the budget.")
    text += [f"Left as it is: {weight.name} ({reason})." for weight, _, reason in lines if reason]
    written = f"Rules written to {rules_out}." if rules_out else "Keep this mix with --rules-out rules.toml."
    return "\n".join([*text, written])


def as_dict(lines: Sequence[Line], mix: Mix | None, rules_out: Path | None) -> dict[str, Any]:
    """The same as plain values."""
    return {"weights": [_weight_dict(line) for line in lines], "plan": mix and _mix_dict(mix, rules_out)}


def _weight_dict(line: Line) -> dict[str, Any]:
    weight, statistics, _ = line
    return {
        "name": weight.name,
        "shape": list(weight.shape),
        "dtype": checks.dtype_name(weight.dtype),
        "codec": weight.codec.spec if weight.codec else None,
        **{key: _finite(value) for key, value in _span(statistics).items()},
        "sqnr_db": {spec: _finite(statistics.sqnr(spec)) for spec in statistics.noise},
        "bytes": statistics.nbytes,
    }


def _mix_dict(mix: Mix, rules_out: Path | None) -> dict[str, Any]:
    single = mix.single
    return {
        "codecs": mix.codecs,
        "bits": mix.bits,
        "sqnr_db": _finite(mix.sqnr),
        "bound_db": _finite(decibels(mix.bound)),
        "exact": mix.exact,
        "uniform": single and {"codec": single.codec, "bits": single.bits, "sqnr_db": _finite(single.sqnr)},
        "rules": str(rules_out) if rules_out else None,
    }


def _span(statistics: Statistics) -> dict[str, float]:
    return {"min": statistics.lowest, "max": statistics.highest, "std": statistics.std}


def _finite(value: float) -> float | None:
    # JSON has no infinity and no NaN.
    return value if math.isfinite(value) else None


def _number(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else str(value)
