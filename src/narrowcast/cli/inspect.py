"""`narrowcast inspect`: what a checkpoint holds, what each codec would cost it, and the best mix under a size."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from narrowcast.cli.bars import share_bar
from narrowcast.cli.failing import refuse
from narrowcast.cli.places import check_picture, check_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narrowcast.cli.weights import Weight
    from narrowcast.codecs import Codec
    from narrowcast.sensitivity import Plan, Statistics

CODECS = "int8,int6,int5,int4,nf4,apot4,int3,int2"


class Line(NamedTuple):
    """A weight and what was measured."""

    weight: Weight
    statistics: Statistics


def inspect(
    path: Annotated[
        Path, typer.Argument(help="A safetensors file, or a folder with one, or with shards and an index.")
    ],
    codecs: Annotated[str, typer.Option(help="The codecs to try, with commas; options go behind a colon.")] = CODECS,
    plot: Annotated[Path | None, typer.Option(help="Draw the ratios into this file (png, svg or pdf).")] = None,
    budget: Annotated[float | None, typer.Option(help="Bits per weight: find the best mix of the codecs.")] = None,
    rules_out: Annotated[Path | None, typer.Option(help="Write the mix of --budget there, as TOML.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of --rules-out.")] = False,
    skip: Annotated[list[str] | None, typer.Option(help="Leave modules alone whose names hold this (regex).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show each weight's shape, range, and signal-to-noise ratio in several codecs.

    With --budget, choose a codec for each weight so that the model has the least noise at that many bits per weight,
    scales included. --rules-out keeps the mix: rules for `narrowcast quantize --rules` and `quantize_(rules=...)`.

    Example: narrowcast inspect model/ --budget 4.5 --rules-out rules.toml
    """
    from narrowcast.cli.weights import weights_in
    from narrowcast.sensitivity import plan

    if plot is not None:
        check_picture("--plot", plot)
        from narrowcast.cli import inspect_plot  # before the work: matplotlib may be missing
    if rules_out is not None:
        if budget is None:
            refuse(
                f"--rules-out {str(rules_out)!r}: writes the mix that --budget finds. Add, for example, --budget 4.5."
            )
        check_place(f"--rules-out {str(rules_out)!r}", rules_out, overwrite)
    chosen = parse_codecs(codecs)
    kept = [_expression(pattern) for pattern in skip or []]
    weights, others = weights_in(path)
    lines = _measure(weights, chosen)
    free = [line for line in lines if _why_not(line, kept) is None]
    found = None
    if budget is not None:
        found = plan([line.statistics for line in free], [codec.spec for codec in chosen], budget)
        if rules_out is not None:
            _write(rules_out, rules(lines, kept, found))
    if plot is not None:
        inspect_plot.draw([line.statistics for line in lines if line.weight.codec is None], found, plot)
    if as_json:
        print(json.dumps({"weights": [_as_dict(line) for line in lines], "plan": _plan_dict(found, rules_out)}))
        return
    # Piped, rich would assume 80 columns and fold every name.
    console = Console() if Console().is_terminal else Console(width=200)
    console.print(_table(lines, chosen, found))
    console.print(f"{len(lines)} weights; {others} other tensors (norms, biases, integers) stay as they are.")
    if found is not None:
        console.print(_summary(found, [line for line in lines if _why_not(line, kept)], kept, rules_out))


def parse_codecs(text: str) -> list[Codec]:
    """ "int8,int4:block=64,scale=bf16,nf4" as three codecs: an option without a name belongs to the one before."""
    import narrowcast as nc

    specs: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if specs and "=" in part and ":" not in part:
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    if not specs:
        raise nc.errors.SpecError(f"--codecs {text!r}: names no codec. Write for example --codecs int8,int4,nf4.")
    return list(dict.fromkeys(nc.codec(spec) for spec in specs))


def rules(lines: Sequence[Line], kept: Sequence[re.Pattern[str]], found: Plan) -> str:
    """A rules file: every weight's codec, or false."""
    bits = f"{found.bits:.3f} bits per weight, mean SQNR {found.sqnr:.2f} dB"
    text = [f"# Written by narrowcast inspect: {bits}.", "# For narrowcast quantize --rules, and quantize_.", "[rules]"]
    for line in lines:
        if line.weight.codec is not None:
            continue
        spec = found.codecs.get(line.weight.name) if _why_not(line, kept) is None else None
        # A JSON string is a TOML basic string; the expression matches this one module.
        key = json.dumps(f"^{re.escape(line.weight.module)}$", ensure_ascii=False)
        text.append(f"{key} = {json.dumps(spec) if spec else 'false'}")
    return "\n".join(text) + "\n"


def _why_not(line: Line, kept: Sequence[re.Pattern[str]]) -> str | None:
    """Why a weight takes no part in a mix; None where it does."""
    if line.weight.codec is not None:
        return f"is {line.weight.codec.spec} already"
    if not line.statistics.numel:
        return "is empty"
    if not line.statistics.finite:
        return "holds a NaN or an infinity"
    matching = next((pattern.pattern for pattern in kept if pattern.search(line.weight.module)), None)
    return f"--skip {matching}" if matching else None


def _write(path: Path, text: str) -> None:
    """A file that is there whole or not at all."""
    from narrowcast.checkpoint.files import Staging

    with Staging(path.absolute().parent) as staging:
        with staging.file(path.name) as file:
            file.write(text.encode())
        staging.publish()


def _expression(pattern: str) -> re.Pattern[str]:
    from narrowcast.errors import SpecError

    try:
        return re.compile(pattern)
    except re.error as error:
        raise SpecError(f"--skip {pattern!r}: not a regular expression: {error}.") from error


def _measure(weights: Sequence[Weight], codecs: Sequence[Codec]) -> list[Line]:
    from narrowcast.sensitivity import measure

    lines = []
    with share_bar("measuring") as progress:
        task = progress.add_task("", total=sum(weight.rows * weight.columns for weight in weights))
        for weight in weights:
            progress.update(task, description=weight.name)
            # An encoded weight has lost what it will lose.
            tried = codecs if weight.codec is None else []
            size = weight.rows, weight.columns
            advance = lambda count: progress.advance(task, count)  # noqa: E731
            lines.append(Line(weight, measure(weight.name, *size, weight.open(), tried, advance=advance)))
    return lines


def _table(lines: Sequence[Line], codecs: Sequence[Codec], found: Plan | None) -> Table:
    table = Table("weight", "shape", "dtype", "min", "max", "std", title="SQNR in dB, by codec")
    for codec in codecs:
        table.add_column(codec.spec, justify="right")
    if found is not None:
        table.add_column("chosen")
    for weight, statistics in lines:
        dtype = str(weight.dtype).removeprefix("torch.")
        kind = dtype if weight.codec is None else f"{weight.codec.spec} of {dtype}"
        span = (statistics.lowest, statistics.highest, statistics.std)
        ratios = [_number(statistics.sqnr(codec.spec)) if statistics.noise else "" for codec in codecs]
        cells = [weight.name, "x".join(map(str, weight.shape)), kind, *(f"{value:.3g}" for value in span), *ratios]
        table.add_row(*cells, *([found.codecs.get(weight.name, "as it is")] if found is not None else []))
    return table


def _number(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else str(value)


def _summary(found: Plan, left: Sequence[Line], kept: Sequence[re.Pattern[str]], rules_out: Path | None) -> str:
    certain = "no mix of these codecs does better" if found.exact else f"no mix exceeds {_bound(found):.2f} dB"
    text = [f"Best mix: {found.bits:.3f} bits per weight, mean SQNR {found.sqnr:.2f} dB; {certain}."]
    if found.uniform is not None:
        one = found.uniform
        text.append(f"Best single codec: {one.codec}, {one.bits:.3f} bits per weight, mean SQNR {one.sqnr:.2f} dB.")
    else:
        text.append("No single codec is within the budget.")
    text += [f"Left as it is: {line.weight.name} ({_why_not(line, kept)})." for line in left]
    written = f"Rules written to {rules_out}." if rules_out else "Keep this mix with --rules-out rules.toml."
    return "\n".join([*text, written])


def _bound(found: Plan) -> float:
    from narrowcast.sensitivity.statistics import decibels

    return decibels(found.bound)


def _as_dict(line: Line) -> dict[str, Any]:
    weight, statistics = line
    return {
        "name": weight.name,
        "shape": list(weight.shape),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "codec": weight.codec.spec if weight.codec else None,
        **{key: _plain(value) for key, value in _span(statistics).items()},
        "sqnr_db": {spec: _plain(statistics.sqnr(spec)) for spec in statistics.noise},
        "bytes": statistics.nbytes,
    }


def _span(statistics: Statistics) -> dict[str, float]:
    return {"min": statistics.lowest, "max": statistics.highest, "std": statistics.std}


def _plain(value: float) -> float | None:
    # JSON has no infinity and no NaN.
    return value if math.isfinite(value) else None


def _plan_dict(found: Plan | None, rules_out: Path | None) -> dict[str, Any] | None:
    if found is None:
        return None
    uniform = found.uniform
    return {
        "codecs": found.codecs,
        "bits": found.bits,
        "sqnr_db": _plain(found.sqnr),
        "exact": found.exact,
        "uniform": uniform and {"codec": uniform.codec, "bits": uniform.bits, "sqnr_db": _plain(uniform.sqnr)},
        "rules": str(rules_out) if rules_out else None,
    }
