"""`narrowcast doctor`: what is installed, what runs, whether it is right, and what to do about what is not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from narrowcast.cli.bars import share_bar
from narrowcast.cli.failing import FAILED

if TYPE_CHECKING:
    from collections.abc import Iterable


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Look the installation over: versions, CPU and GPU, kernels, a check that bytes agree, and what is missing.

    Ends with 1 if there is a fault, and names the command that mends it.

    Example: narrowcast doctor --json > doctor.json
    """
    found = _examine()
    if as_json:
        print(json.dumps(found))
    else:
        _show(found, Console())
    raise typer.Exit(0 if found["ok"] else FAILED)


def _examine() -> dict[str, Any]:
    with share_bar("comparing bytes") as progress:
        task = progress.add_task("", total=None)

        from narrowcast.cli import agreement, health

        progress.update(task, total=len(health.compiled()) * len(agreement.specs()))
        return health.examine(lambda: progress.advance(task))


def _show(found: dict[str, Any], console: Console) -> None:
    table = Table(show_header=False)
    for name, value in _lines(found):
        table.add_row(name, value)
    console.print(table, markup=False)
    for title, style, findings in (("fault", "red", found["faults"]), ("could be added", "dim", found["hints"])):
        for finding in findings:
            # One line each, so that a command can be copied out of a narrow window.
            console.print(f"{title}: {finding['what']}", style=style, soft_wrap=True, highlight=False, markup=False)
            console.print(f"    {finding['fix']}", soft_wrap=True, highlight=False, markup=False)
    count = len(found["faults"])
    console.print("All is well." if found["ok"] else f"{count} fault{'s' if count > 1 else ''}.", highlight=False)


def _lines(found: dict[str, Any]) -> Iterable[tuple[str, str]]:
    machine = found["machine"]
    for name, version in found["versions"].items():
        yield name, version or "not installed"
    yield "system", machine["system"]
    yield "CPU", f"{machine['cpu']}, {machine['cores']} cores, torch uses {machine['threads']} threads"
    yield "CPU features", " ".join(machine["features"]) or "not known"
    for gpu in machine["gpus"] or [None]:
        yield "GPU", f"{gpu['name']}, {gpu['bytes'] / 2**30:.0f} GiB, {gpu['capability']}" if gpu else "none"
    yield "process groups", ", ".join(name for name, there in found["backends"].items() if there) or "none"
    runs: dict[tuple[str, str], list[str]] = {}
    for codec, devices in found["kernels"].items():
        for device, kernel in devices.items():
            runs.setdefault((device, kernel), []).append(codec)
    for (device, kernel), codecs in runs.items():
        yield f"{kernel} on {device}", " ".join(codecs)
    for check in found["checks"]:
        verdict = f"disagrees in {len(check['differ'])} of" if check["differ"] else "agrees in all"
        tried = f"{check['settings']} settings of {check['codecs']} codecs"
        yield f"bytes of {check['kernel']}", f"{verdict} {tried} with the reference"
