"""`narrowcast doctor`: versions, the machine, which kernels run, whether they are right, and how to fix what is wrong.

This module has the arguments and the printing. `health.py` examines the installation, `agreement.py` compares kernels,
`group.py` measures the links between ranks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from narrowcast.cli.doctor.group import examine_group
from narrowcast.cli.shared.bars import share_bar
from narrowcast.cli.shared.failing import FAILED
from narrowcast.cli.shared.tables import show_table

if TYPE_CHECKING:
    from collections.abc import Iterable


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    group: Annotated[
        bool, typer.Option("--group", help="Under torchrun: measure every pair of ranks, and name the slow link.")
    ] = False,
) -> None:
    """Check the installation: versions, CPU and GPU, kernels, whether their bytes agree, and what is missing.

    The exit code is 1 if there is a fault. Each fault comes with the command that fixes it.

    Example: narrowcast doctor --json > doctor.json

    The network: torchrun --nproc-per-node 4 --no-python narrowcast doctor --group
    """
    if group:
        examine_group(as_json)
        return
    report = _examine()
    if as_json:
        print(json.dumps(report))
    else:
        _show(report, Console())
    raise typer.Exit(0 if report["ok"] else FAILED)


def _examine() -> dict[str, Any]:
    with share_bar("comparing bytes") as progress:
        task = progress.add_task("", total=None)

        from narrowcast.cli.doctor import agreement, health

        progress.update(task, total=len(health.compiled()) * len(agreement.specs()))
        return health.examine(lambda: progress.advance(task))


def _show(report: dict[str, Any], console: Console) -> None:
    table = Table(show_header=False)
    for name, value in _lines(report):
        table.add_row(name, value)
    show_table(table, console)
    for title, style, findings in (("fault", "red", report["faults"]), ("optional", "dim", report["hints"])):
        for finding in findings:
            # One line each, so that a command can be copied out of a narrow window.
            console.print(f"{title}: {finding['what']}", style=style, soft_wrap=True, highlight=False, markup=False)
            console.print(f"    {finding['fix']}", soft_wrap=True, highlight=False, markup=False)
    count = len(report["faults"])
    console.print("No faults." if report["ok"] else f"{count} fault{'s' if count > 1 else ''}.", highlight=False)


def _lines(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    machine = report["machine"]
    for name, version in report["versions"].items():
        yield name, version or "not installed"
    yield "system", machine["system"]
    yield "CPU", f"{machine['cpu']}, {machine['cores']} cores, torch uses {machine['threads']} threads"
    yield "CPU features", " ".join(machine["features"]) or "unknown"
    for gpu in machine["gpus"] or [None]:
        yield "GPU", f"{gpu['name']}, {gpu['bytes'] / 2**30:.0f} GiB, {gpu['capability']}" if gpu else "none"
    yield "process groups", ", ".join(name for name, there in report["backends"].items() if there) or "none"
    runs: dict[tuple[str, str], list[str]] = {}
    for codec, devices in report["kernels"].items():
        for device, kernel in devices.items():
            runs.setdefault((device, kernel), []).append(codec)
    for (device, kernel), codecs in runs.items():
        yield f"{kernel} on {device}", " ".join(codecs)
    for check in report["checks"]:
        verdict = f"disagrees in {len(check['differ'])} of" if check["differ"] else "agrees in all"
        tried = f"{check['settings']} settings of {check['codecs']} codecs"
        yield f"bytes of {check['kernel']}", f"{verdict} {tried} with the reference"
