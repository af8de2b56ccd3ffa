"""Scripts of the repository, run as commands. Wheels do not hold them.

The checkout is looked for in the current folder and those above it, then around the package (an editable install).
Arguments go to the script unchanged, and its exit code is the command's. Signals are passed on, so that the script ends
as if it had been started directly.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand

import narrowcast
from narrowcast.cli.shared.failing import refuse

FORWARDING = {"allow_extra_args": True, "ignore_unknown_options": True}
"""The context settings of a `ForwardingCommand`."""


class ForwardingCommand(TyperCommand):
    """A command that forwards all its arguments, except --help where it comes first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args[:1] == ["--help"] else ["--", *args])


def find_checkout(script: str) -> Path | None:
    """The folder of narrowcast's repository that holds `script`, or None."""
    here, package = Path.cwd(), Path(narrowcast.__file__).resolve()
    for folder in (here, *here.parents, *package.parents[2:3]):
        try:
            ours = 'name = "narrowcast"' in (folder / "pyproject.toml").read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if ours and (folder / script).exists():
            return folder
    return None


def run_script(command: str, script: str, arguments: list[str]) -> NoReturn:
    """Run a script of the repository to its end, and exit with its code."""
    root = find_checkout(script)
    if root is None:
        refuse(
            f"{command}: runs {script} of narrowcast's repository, and neither the current folder nor one above it is "
            f"a clone of it. Packages from pip have no benchmarks. Clone the repository, and run narrowcast {command} "
            "inside it."
        )
    # The script measures the narrowcast that runs this command, wherever the checkout is.
    paths = [str(Path(narrowcast.__file__).resolve().parents[1]), str(root / "bench"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    raise typer.Exit(_wait([sys.executable, str(root / script), *arguments], environment))


def _wait(command: list[str], environment: dict[str, str]) -> int:
    """Run to the end. A terminal sends Ctrl-C to the script itself, which may clean up; SIGTERM is passed on."""
    old = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with subprocess.Popen(command, env=environment) as process:
            signal.signal(signal.SIGTERM, lambda *_: process.terminate())
            code = process.wait()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
