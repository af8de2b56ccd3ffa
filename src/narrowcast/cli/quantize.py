"""`narrowcast quantize`: a checkpoint to a quantized one, in bounded memory, on one process or several."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from narrowcast.cli.shared.bars import bytes_bar
from narrowcast.cli.shared.failing import refuse
from narrowcast.cli.shared.launched import rank, world
from narrowcast.cli.shared.tables import show_table

if TYPE_CHECKING:
    from narrowcast.checkpoint.conversion import Conversion

RULES = r"TOML with a table \[rules] of regex = codec or false, or the same as JSON."
"""What rich would take for markup has a backslash before it."""
DATA = "Text for --rounding gptq: a file with one sample on each line. Needs transformers."


def quantize(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A safetensors file, or a model's folder.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="A new folder, or a file that ends in .safetensors.")],
    codec: Annotated[str, typer.Option(help="The codec of weights that no rule matches.")] = "int8",
    rules: Annotated[Path | None, typer.Option(help=RULES)] = None,
    rounding: Annotated[str, typer.Option(help="nearest, search (no data) or gptq (with --data).")] = "nearest",
    data: Annotated[Path | None, typer.Option(help=DATA)] = None,
    max_shard_size: Annotated[str | None, typer.Option(help="Such as 5GB. By default, the files of SRC.")] = None,
    allow_nonfinite: Annotated[bool, typer.Option(help="Also encode weights that hold an infinity or a NaN.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace the weights in DST.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Quantize a checkpoint without loading the model: tensor by tensor, to the bytes that quantize_ gives.

    Run again after an interruption, it resumes. Under torchrun, the processes share the files.

    With --rounding gptq the model is loaded with transformers, and rounded on the text of --data. Rounded rows wait in
    a hidden folder beside DST until it is written.

    Example: narrowcast quantize llama/ llama-int4/ --codec int4:block=64 --rules rules.toml
    """
    if not source.exists():
        refuse(f"SRC={str(source)!r}: no such file or folder. Check the path.")

    _check_rounding(rounding, data)

    from narrowcast.checkpoint.conversion import open_conversion

    options: dict[str, Any] = {"max_shard_size": max_shard_size, "allow_nonfinite": allow_nonfinite}
    named = _read_rules(rules)
    open_conversion(source, target, codec, named, **options)  # refuses what is wrong before the model is loaded
    if data is not None:
        try:
            from narrowcast.integrations.text_calibration import round_on_data
        except ImportError:
            refuse("--rounding gptq: loading the model needs transformers. Run: pip install 'narrowcast[hf]'")
        options["rows"] = round_on_data(source, codec, named, data, _kept_rows(target))
    conversion = open_conversion(source, target, codec, named, rounding=rounding, **options)
    resumed = _run(conversion, overwrite)
    if data is not None:
        shutil.rmtree(_kept_rows(target), ignore_errors=True)
    if rank() == 0:
        summary = {**conversion.summary(), "files_kept": resumed}
        if as_json:
            print(json.dumps(summary))
        else:
            _show(summary, Console())


def _kept_rows(target: Path) -> Path:
    """The folder, beside the target, that keeps rows of --rounding gptq until the target is written."""
    return target.absolute().with_name(f".{target.name}.narrowcast-rounding")


def _check_rounding(rounding: str, data: Path | None) -> None:
    if rounding not in ("nearest", "search", "gptq"):
        refuse(f"--rounding {rounding!r}: expected nearest, search or gptq.")
    if (rounding == "gptq") != (data is not None):
        refuse(
            "--rounding gptq and --data go together: gptq rounds on text that goes through the model. Write, for "
            "example, --rounding gptq --data sentences.txt; without data there is --rounding search."
        )
    if data is not None and world() > 1:
        refuse("--rounding gptq: runs the model in one process. Start it without torchrun.")


def _read_rules(path: Path | None) -> dict[str, Any] | None:
    """The table [rules] of a TOML file, or the object "rules" of a JSON file."""
    from narrowcast.errors import SpecError

    if path is None:
        return None
    is_json = path.suffix == ".json"
    read = json.loads if is_json else _toml(path)
    try:
        document = read(path.read_text("utf-8"))
    except OSError as error:
        raise SpecError(f"--rules {path}: cannot be read: {error.strerror}. Check the path.") from error
    except ValueError as error:
        hint = "" if is_json else " In TOML, write regular expressions in single quotes."
        raise SpecError(f"--rules {path}: cannot be read: {error}.{hint}") from error
    table = document.get("rules") if isinstance(document, dict) else None
    if not isinstance(table, dict) or len(document) > 1:
        raise SpecError(
            f'--rules {path}: expected one table, [rules], with lines such as "mlp" = "int4:block=64" or "lm_head" = '
            f"false; found {[*document] if isinstance(document, dict) else type(document).__name__}."
        )
    return table


def _toml(path: Path) -> Callable[[str], Any]:
    from narrowcast.errors import SpecError

    # The standard library reads TOML from 3.11 on; tomli is the same code for 3.10.
    try:
        return importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        raise SpecError(
            f"--rules {path}: Python 3.10 has no TOML reader. Run pip install tomli, or write the rules as JSON: "
            '{"rules": {"lm_head": false}} in a file that ends in .json.'
        ) from error


# -- on every rank ----------------------------------------------------------------------------------------------------


def _run(conversion: Conversion, overwrite: bool) -> list[str]:
    """Convert this rank's share of the files. Returns the names of the files, of all ranks, that were done before."""
    with _process_group():
        first = rank() == 0
        _run_on_all(lambda: conversion.prepare(overwrite) if first else None)
        mine = conversion.parts[rank() :: world()]
        total = sum(part.nbytes for part in mine)
        progress = bytes_bar(shown=first)

        def work() -> list[str]:
            done = []
            with progress:
                task = progress.add_task("quantizing", total=total)
                for part in mine:
                    progress.update(task, description=part.name)
                    if conversion.is_done(part):
                        done.append(part.name)
                        progress.advance(task, part.nbytes)
                    else:
                        conversion.convert(part, lambda count: progress.advance(task, count))
            return done

        done = _run_on_all(work)
        _run_on_all(lambda: conversion.finish() if first else None)
        return sorted(name for names in done for name in names)


def _run_on_all(work: Callable[[], Any]) -> list[Any]:
    """Run `work` on every rank. Returns the results of all; an error of one rank is raised on all."""
    import torch.distributed as dist

    from narrowcast.errors import NarrowcastError

    error: Exception | None = None
    result = None
    try:
        result = work()
    except (NarrowcastError, OSError) as caught:
        error = caught
    answers: list[Any] = [(error, result)]
    if world() > 1:
        answers *= world()
        dist.all_gather_object(answers, (error, result))
    for failed, _ in answers:
        if failed is not None:
            raise failed
    return [result for _, result in answers]


@contextmanager
def _process_group() -> Iterator[None]:
    """A process group for the time of the work. A rank that is done waits for the others, however long they take."""
    from datetime import timedelta

    import torch.distributed as dist

    if world() > 1:
        dist.init_process_group("gloo", timeout=timedelta(days=7))
    try:
        yield
    finally:
        if world() > 1:
            dist.destroy_process_group()


# -- the summary ------------------------------------------------------------------------------------------------------


def _show(summary: dict[str, Any], console: Console) -> None:
    table = Table("", "tensors", "bytes before", "bytes after", "of before")
    codecs = summary["codecs"]
    rest = {key: summary[key] - sum(line[key] for line in codecs.values()) for key in ("bytes_before", "bytes_after")}
    lines = {**codecs, "copied": {"tensors": summary["copied"], **rest}}
    total = {"tensors": summary["quantized"] + summary["copied"]}
    lines["all"] = {**total, **{key: summary[key] for key in ("bytes_before", "bytes_after")}}
    for name, line in lines.items():
        before, after = line["bytes_before"], line["bytes_after"]
        share = f"{after / before:.1%}" if before else ""
        table.add_row(name, str(line["tensors"]), f"{before:,}", f"{after:,}", share)
    show_table(table, console)
    for title, names in (
        ("done by an earlier run", summary["files_kept"]),
        ("copied files", summary["files_copied"]),
        ("files not copied", summary["files_left"]),
        ("rules that match no weight", summary["unused_rules"]),
    ):
        if names:
            console.print(f"{title}: {', '.join(names)}", highlight=False, markup=False)
    reasons: dict[str, list[str]] = {}
    for name, reason in summary["skips"].items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        console.print(f"not quantized ({reason}): {shown}", highlight=False, markup=False)
