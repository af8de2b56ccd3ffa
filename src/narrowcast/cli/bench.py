"""`narrowcast bench` and `narrowcast netlab`: the scripts of the repository, which no wheel holds.

A checkout is looked for around the current folder, then around the package (an editable install). Arguments go to the
script as they are, its exit code comes back, and so do signals: the script ends as if it had been started by itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

import narrowcast
from narrowcast.cli.failing import Commands, refuse

SCRIPTS = {
    "codec": ("Every codec on the CPU: bytes, error and time, beside a plain copy.", "--quick --codecs int8,int4"),
    "wire": ("all_reduce on links of a known rate, beside gloo's own. Needs root.", "--only slow --out results"),
    "training": ("DDP over slow links, beside its rivals: time and loss. Needs root; hours.", "--only speed"),
    "linear": ("Linear layers on encoded weights on the CPU, beside rivals.", "--quick --batches 1,8"),
    "grids": ("Which grid of levels suits which numbers: signal to noise.", "--numel 65536"),
}


class PassedOn(TyperCommand):
    """A command that reads none of its arguments, but --help where it comes first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args[:1] == ["--help"] else ["--", *args])


app = typer.Typer(cls=Commands, no_args_is_help=True, help="Run a benchmark of the repository.")
_ANY = {"allow_extra_args": True, "ignore_unknown_options": True}


def _command(name: str) -> Callable[[typer.Context], None]:
    def run(ctx: typer.Context) -> None:
        given = ctx.args[1:] if ctx.args[:1] == ["--"] else ctx.args
        _run(f"bench {name}", f"bench/{name}.py", given)

    return run


for _name, (_what, _example) in SCRIPTS.items():
    _text = (
        f"{_what}\n\nIts options: narrowcast bench {_name} -- --help\n\nExample: narrowcast bench {_name} {_example}"
    )
    app.command(_name, cls=PassedOn, context_settings=_ANY, help=_text)(_command(_name))


def netlab(ctx: typer.Context) -> None:
    """Run a command on every rank of a network in a box, with links of a known rate and delay. Needs root.

    Its options: narrowcast netlab --ranks 2 --help

    Example: narrowcast netlab --ranks 4 --rate 1gbit --delay 1ms -- python train.py
    """
    _run("netlab", "bench/netlab", ctx.args)


def register_netlab(commands: typer.Typer) -> None:
    """Add `netlab` to a group."""
    commands.command("netlab", cls=PassedOn, context_settings=_ANY)(netlab)


def checkout(script: str) -> Path | None:
    """The folder of the repository that holds `script`, if there is one about."""
    here, package = Path.cwd(), Path(narrowcast.__file__).resolve()
    for folder in (here, *here.parents, *package.parents[2:3]):
        try:
            ours = 'name = "narrowcast"' in (folder / "pyproject.toml").read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if ours and (folder / script).exists():
            return folder
    return None


def _run(command: str, script: str, arguments: list[str]) -> None:
    root = checkout(script)
    if root is None:
        refuse(
            f"{command}: runs {script} of narrowcast's repository, which is neither the current folder nor above it; "
            f"what pip installs has no benchmarks. Clone the repository, and run narrowcast {command} in that folder."
        )
    # What is measured is the narrowcast that was called, wherever the scripts are.
    paths = [str(Path(narrowcast.__file__).resolve().parents[1]), str(root / "bench"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if command == "netlab":
        environment["NETLAB_PROGRAM"] = "narrowcast netlab"  # for its usage
    raise typer.Exit(_wait([sys.executable, str(root / script), *arguments], environment))


def _wait(command: list[str], environment: dict[str, str]) -> int:
    """Run to the end. Ctrl-C reaches the script by itself, which may have to clean up; other signals are passed on."""
    old = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with subprocess.Popen(command, env=environment) as process:
            signal.signal(signal.SIGTERM, lambda *_: process.terminate())
            code = process.wait()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
