"""`narrowcast inspect`: what a checkpoint holds, what each codec loses on it, and the best mix of codecs under a size.

This module has the arguments and the order of the work. `weights.py` finds the weights of a checkpoint, `report.py`
writes tables, JSON and rules, `plot.py` draws the figure.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from narrowcast.cli.shared.bars import share_bar
from narrowcast.cli.shared.failing import refuse
from narrowcast.cli.shared.places import check_picture, check_place
from narrowcast.cli.shared.specs import split_specs
from narrowcast.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narrowcast.cli.inspect.report import Line
    from narrowcast.cli.inspect.weights import Weight
    from narrowcast.codecs import Codec

DATA = "Text, a sample on each line: the mix is chosen by what the model's output loses. Needs transformers."
CODECS = "int8,int6,int5,int4,nf4,apot4,int3,int2"


def inspect(
    path: Annotated[Path, typer.Argument(help="A safetensors file, or a folder with one, or with shards.")],
    codecs: Annotated[str, typer.Option(help="The codecs to try, separated by commas.")] = CODECS,
    plot: Annotated[Path | None, typer.Option(help="Draw the ratios into this file (png, svg or pdf).")] = None,
    budget: Annotated[float | None, typer.Option(help="Bits per weight: find the best mix of the codecs.")] = None,
    rules_out: Annotated[Path | None, typer.Option(help="Write the mix of --budget to this file, as TOML.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of --rules-out.")] = False,
    rounding: Annotated[str, typer.Option(help="nearest, or search: scales that lose least.")] = "nearest",
    data: Annotated[Path | None, typer.Option(help=DATA)] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Leave out modules whose names match (regex).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show each weight's shape, range, and signal-to-noise ratio in several codecs.

    With --budget, choose a codec for each weight so that the model has little noise at that many bits per weight,
    scales included. --rules-out writes the mix as rules for `narrowcast quantize --rules` and `quantize_(rules=...)`.
    With --data the model runs on that text, and ratios are those of its output to what each weight's error adds to it.

    Example: narrowcast inspect model/ --budget 4.5 --rules-out rules.toml
    """
    _check_options(rounding, plot, budget, rules_out, overwrite)
    if plot is not None:
        from narrowcast.cli.inspect.plot import draw  # before the work: matplotlib may be missing

    from narrowcast.checkpoint.files import new_file
    from narrowcast.cli.inspect import report
    from narrowcast.cli.inspect.weights import weights_in
    from narrowcast.codecs import codec as as_codec
    from narrowcast.codecs.mix import mix_codecs

    tried = list(dict.fromkeys(as_codec(spec) for spec in split_specs(codecs)))
    skipped = [_parse_pattern(pattern) for pattern in skip or []]
    weights, others = weights_in(path)
    costs = None if data is None else _costs(path, data)
    lines = _measure(weights, tried, skipped, rounding == "search")
    if costs is not None:
        report.set_costs(lines, costs)
    mix = None
    if budget is not None:
        free = [line.statistics for line in lines if line.why_not is None]
        mix = mix_codecs(free, [codec.spec for codec in tried], budget)
        if rules_out is not None:
            with new_file(rules_out) as file:
                file.write(report.rules(lines, mix).encode())
    if plot is not None:
        draw([line.statistics for line in lines if line.weight.codec is None], mix, plot)
    if as_json:
        print(json.dumps(report.as_dict(lines, mix, rules_out)))
    else:
        report.show(lines, others, tried, mix, rules_out)


def _check_options(
    rounding: str, plot: Path | None, budget: float | None, rules_out: Path | None, overwrite: bool
) -> None:
    if rounding not in ("nearest", "search"):
        refuse(f"--rounding {rounding!r}: expected nearest or search; a checkpoint alone has no data for gptq.")
    if plot is not None:
        check_picture("--plot", plot)
    if rules_out is not None:
        if budget is None:
            refuse(
                f"--rules-out {str(rules_out)!r} writes the mix that --budget finds. Add, for example, --budget 4.5."
            )
        check_place(f"--rules-out {str(rules_out)!r}", rules_out, overwrite)


def _costs(path: Path, data: Path) -> dict[str, float]:
    """What errors of each weight cost the model's output on a text."""
    if not path.exists():
        refuse(f"PATH={str(path)!r}: no such file or folder. Check the path.")
    try:
        from narrowcast.integrations.text_calibration import costs_on_data
    except ImportError:
        refuse("--data: loading the model needs transformers. Run: pip install 'narrowcast[hf]'")
    return costs_on_data(path, data)


def _parse_pattern(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise SpecError(f"--skip {pattern!r}: not a regular expression: {error}.") from error


def _measure(
    weights: Sequence[Weight], codecs: Sequence[Codec], skipped: Sequence[re.Pattern[str]], searched: bool
) -> list[Line]:
    from narrowcast.cli.inspect.report import Line, why_not
    from narrowcast.codecs.sensitivity import measure

    lines = []
    with share_bar("measuring") as progress:
        task = progress.add_task("", total=sum(weight.rows * weight.columns for weight in weights))
        for weight in weights:
            progress.update(task, description=weight.name)
            # A weight that is encoded already is not encoded again.
            tried = codecs if weight.codec is None else []
            advance = lambda count: progress.advance(task, count)  # noqa: E731
            options: dict[str, Any] = {"searched": searched, "advance": advance}
            statistics = measure(weight.name, weight.rows, weight.columns, weight.read, tried, **options)
            lines.append(Line(weight, statistics, why_not(weight, statistics, skipped)))
    return lines
