"""`narrowcast netlab`: the network in a box of the repository (bench/netlab). See shared/scripts.py."""

from __future__ import annotations

import typer

from narrowcast.cli.shared.scripts import run_script


def netlab(ctx: typer.Context) -> None:
    """Run a command on every rank of a network in a box, with links of a known rate and delay. Needs root.

    Its options: narrowcast netlab --ranks 2 --help

    Example: narrowcast netlab --ranks 4 --rate 1gbit --delay 1ms -- python train.py
    """
    run_script("netlab", "bench/netlab", ctx.args, {"NETLAB_PROGRAM": "narrowcast netlab"})  # the name in its usage
