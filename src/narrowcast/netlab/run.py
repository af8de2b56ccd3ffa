"""One run of a command on every rank, from its arguments to its figures."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import report
from .errors import NetlabError
from .network import Network
from .output import Output
from .supervise import Stop, Watch


def check(command: list[str], ranks: int, only: list[int], grace: float, json_file: Path | None) -> None:
    """What can be known to be wrong before anything is made."""
    if not shutil.which(command[0]):
        raise NetlabError(
            f"there is no command {command[0]!r}. Options come first, then the command, for example: narrowcast netlab "
            "--ranks 4 -- python train.py"
        )
    for rank in only:
        if not 0 <= rank < ranks:
            raise NetlabError(f"--only {rank}: with --ranks {ranks}, ranks are 0 to {ranks - 1}.")
    if grace < 0:
        raise NetlabError(f"--grace {grace:g}: seconds, 0 at the least.")
    if json_file:
        if json_file.is_dir():
            raise NetlabError(f"--json {json_file}: is a folder. Name a file in it, such as {json_file / 'run.json'}.")
        try:
            tempfile.TemporaryFile(dir=json_file.absolute().parent).close()
        except OSError as error:
            raise NetlabError(
                f"--json {json_file}: cannot write to the folder {str(json_file.parent)!r}: {error.strerror}."
            ) from error


def run(
    network: Network,
    command: list[str],
    output: Output,
    say: Callable[[str], None],
    *,
    grace: float,
    keep_going: bool,
) -> dict[str, Any]:
    """One run from the first namespace to the last; returns the summary."""
    with Stop().listening() as stop, network:
        if network.swept:
            say(f"removed {len(network.swept)} namespaces that an earlier run, killed, left: {network.swept[0]}, ...")
        say(report.headline(network))
        begun = [] if stop.numbers else network.start(command, pipes=True)
        watch = Watch(begun, output, stop, grace=grace, keep_going=keep_going, say=say, check=network.check)
        ended = watch.run()
        return report.summary(network, network.counters(), ended, watch.code())
