"""The command: `netlab [options] -- command`. Its own lines go to stderr, so that stdout is the ranks'.

Ends with 0 if every rank does, with the first failing rank's code otherwise, with 2 if the network cannot be had or the
arguments are wrong, and with 128 and the signal's number if a signal ended it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from . import report
from .errors import NetlabError
from .network import Network
from .output import Output
from .supervise import Stop, Watch

PROGRAM = os.environ.pop("NETLAB_PROGRAM", "python bench/netlab")
"""What it is called by: `narrowcast netlab` says so. Ranks do not see the variable."""
HELP = f"""
Run a command on every rank of a network in a box, one network namespace each.

\b
Examples:
  {PROGRAM} --ranks 4 -- python train.py                            as fast as the machine
  {PROGRAM} --ranks 4 --rate 1gbit --delay 1ms -- python train.py   an office network
  {PROGRAM} --ranks 8 --rate 100mbit --only 0 -- python bench.py    print rank 0 alone
  {PROGRAM} --ranks 4 --per-host 2 --rate 1gbit -- python train.py  two hosts of two ranks
  {PROGRAM} --ranks 2 --rate 10gbit --json run.json -- ./script.sh  figures for a program

Each rank finds what torchrun sets (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...), the interface to use
(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, NETLAB_IFNAME), the others by the names rank0, rank1, ..., and, unless you set
them, OMP_NUM_THREADS=1 and PYTHONUNBUFFERED=1. It has no route to anywhere but the other ranks.

Ends with 0 if every rank does, or with the code of the first that failed. Needs root, or CAP_SYS_ADMIN and
CAP_NET_ADMIN.
"""

Ranks = Annotated[int, typer.Option("--ranks", "-n", metavar="N", help="How many ranks.")]
PerHost = Annotated[int, typer.Option(metavar="N", help="How many ranks share a host, and its link.")]
Rate = Annotated[str | None, typer.Option(metavar="RATE", help="Of each rank's link, each way: 1gbit, 100mbit.")]
Delay = Annotated[str | None, typer.Option(metavar="TIME", help="From rank to rank, one way: 1ms, 200us.")]
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
    delay_by: By = "auto",
    tcp: Tcp = None,
    only: Only = None,
    keep_going: Keep = False,
    grace: Grace = 3.0,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(line: str) -> None:
        if not quiet:
            console.print(f"netlab: {line}", markup=False, style="dim")

    try:
        check(command, ranks, only or [], grace, json_file)
        network = Network(ranks, rate, delay, delay_by=delay_by, tcp=tcp, per_host=per_host)
        results = run(network, command, Output(only or []), say, grace=grace, keep_going=keep_going)
    except NetlabError as error:
        console.print(f"netlab: {error}", markup=False, style="red")
        raise typer.Exit(2) from None
    except BrokenPipeError:  # as in `netlab ... | head`: nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(141) from None
    if json_file:
        json_file.write_text(json.dumps(results, indent=1) + "\n")
    if not quiet:
        console.print(report.table(results), soft_wrap=False)
    raise typer.Exit(results["exit_code"])


def check(command: list[str], ranks: int, only: list[int], grace: float, json_file: Path | None) -> None:
    """What can be known to be wrong before anything is made."""
    if not shutil.which(command[0]):
        raise NetlabError(
            f"there is no command {command[0]!r}. Options come first, then the command, for example:\n"
            f"  {PROGRAM} --ranks 4 -- python train.py"
        )
    for rank in only:
        if not 0 <= rank < ranks:
            raise NetlabError(f"--only {rank}: with --ranks {ranks}, ranks are 0 to {ranks - 1}.")
    if grace < 0:
        raise NetlabError(f"--grace {grace:g}: seconds, 0 at the least.")
    if json_file and not json_file.absolute().parent.is_dir():
        raise NetlabError(f"--json {json_file}: there is no folder {json_file.parent}.")


def run(network: Network, command: list[str], output: Output, say: Any, *, grace: float, keep_going: bool) -> Any:
    """One run from the first namespace to the last; returns the summary."""
    with Stop().listening() as stop, network:
        if network.swept:
            say(f"removed {len(network.swept)} namespaces that an earlier run, killed, left: {network.swept[0]}, ...")
        say(report.headline(network))
        begun = [] if stop.numbers else network.start(command, pipes=True)
        watch = Watch(begun, output, stop, grace=grace, keep_going=keep_going, say=say, check=network.check)
        ended = watch.run()
        return report.summary(network, network.counters(), ended, watch.code())


def main() -> None:
    """`python bench/netlab`, or `narrowcast netlab`."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    # Options end where the command begins: its own are not netlab's.
    app.command("netlab", help=HELP, no_args_is_help=True, context_settings={"allow_interspersed_args": False})(netlab)
    app(prog_name=PROGRAM)
