"""`narrowcast netlab`: a command on every rank of a network in a box. See narrowcast/netlab.

Its own lines go to stderr, so that stdout is the ranks'. It ends with 0 if every rank does, with the code of the first
that failed otherwise, and with 128 and the signal's number if a signal ended it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from narrowcast.cli.shared.tables import show_table

SETTINGS = {"allow_interspersed_args": False}
"""Options end where the command begins: its own are not netlab's."""

Ranks = Annotated[int, typer.Option("--ranks", "-n", metavar="N", help="How many ranks.")]
PerHost = Annotated[int, typer.Option(metavar="N", help="How many ranks share a host, and its link.")]
Rate = Annotated[
    str | None, typer.Option(metavar="RATE", help="Of a rank's link, each way: 1gbit, or 1gbit,100mbit for each rank.")
]
Delay = Annotated[
    str | None, typer.Option(metavar="TIME", help="From rank to rank, one way: 1ms, or 1ms,50ms for each rank.")
]
Loss = Annotated[str | None, typer.Option(metavar="SHARE", help="Of the packets between ranks that are lost: 0.1%.")]
By = Annotated[
    str, typer.Option(help="Who delays: netem (the kernel), line (user space), auto: netem if there is one.")
]
Tcp = Annotated[
    str | None, typer.Option(metavar="NAME", help="How TCP shares a link: cubic, reno, bbr; else the machine's way.")
]
Only = Annotated[list[int] | None, typer.Option(metavar="RANK", help="Print this rank alone (repeat for more).")]
Keep = Annotated[bool, typer.Option("--keep-going", help="When a rank fails, let the others run.")]
Grace = Annotated[
    float, typer.Option(metavar="SECONDS", help="For the others to end, then again from SIGTERM to SIGKILL.")
]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the summary there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing of netlab's own but errors.")]
Command = Annotated[list[str], typer.Argument(metavar="COMMAND", help="What to run, with its arguments.")]


def netlab(
    command: Command,
    ranks: Ranks = 2,
    per_host: PerHost = 1,
    rate: Rate = None,
    delay: Delay = None,
    loss: Loss = None,
    delay_by: By = "auto",
    tcp: Tcp = None,
    only: Only = None,
    keep_going: Keep = False,
    grace: Grace = 3.0,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Run a command on every rank of a network in a box, with links of a known rate and delay. Linux; needs root.

    Each rank finds what torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...), the interface to use
    (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, NETLAB_IFNAME), the others by the names rank0, rank1, ..., and, unless you
    set them, OMP_NUM_THREADS=1 and PYTHONUNBUFFERED=1. It has no route to anywhere but the other ranks.

    Ends with 0 if every rank does, or with the code of the first that failed.

    Example: narrowcast netlab --ranks 4 --rate 1gbit --delay 1ms -- python train.py

    Two hosts of two ranks: narrowcast netlab --ranks 4 --per-host 2 --rate 1gbit -- python train.py

    One slow rank: narrowcast netlab --ranks 3 --rate 1gbit,1gbit,100mbit -- python train.py
    """
    from narrowcast.netlab import Network, report
    from narrowcast.netlab import run as running
    from narrowcast.netlab.output import Output

    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(line: str) -> None:
        if not quiet:
            console.print(f"netlab: {line}", markup=False, style="dim")

    running.check(command, ranks, only or [], grace, json_file)
    network = Network(ranks, rate, delay, loss=loss, delay_by=delay_by, tcp=tcp, per_host=per_host)
    results = running.run(network, command, Output(only or []), say, grace=grace, keep_going=keep_going)
    if json_file:
        json_file.write_text(json.dumps(results, indent=1) + "\n")
    if not quiet:
        show_table(report.table(results), console)
    raise typer.Exit(results["exit_code"])
