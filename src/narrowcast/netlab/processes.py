"""A process inside a namespace, with the variables of a rank.

It leads a session of its own, so that a signal reaches all that it started, and dies with its parent: the kernel sends
it SIGKILL when the thread that started it ends, however that ended. So start ranks from a thread that outlives them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from .commands import find
from .counters import INTERFACE

PORT = 29500  # torchrun's. Each rank has a network of its own, so it is always free.
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)  # loaded here: between fork and exec it would be too late
# `ip netns exec` gives the process mounts of its own, with the namespace's /sys; the names of the ranks are one more.
# The file goes at once, so that a run that is killed leaves none; the mount keeps what was in it.
ENTER = 'f=$(mktemp) && printf %s "$0" > "$f" && chmod 644 "$f" && mount --bind "$f" /etc/hosts; rm -f "$f"; exec "$@"'


def variables(rank: int, addresses: Sequence[str], given: Mapping[str, str], per_host: int = 1) -> dict[str, str]:
    """The environment of a rank: what torchrun sets, and the interface for gloo, NCCL and `netlab.read`."""
    ranks, host = str(per_host * len(addresses)), rank // per_host
    fixed = {
        "RANK": str(rank),
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": str(rank % per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(len(addresses)),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": ranks,
        "ROLE_NAME": "default",
        "MASTER_ADDR": addresses[0],
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "NCCL_SOCKET_IFNAME": INTERFACE,
        "NETLAB_IFNAME": INTERFACE,
        "NETLAB_ADDRESS": addresses[host],
    }
    # As torchrun does: ranks that share a machine would each take all of its cores. And lines come as they are printed.
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **given, **fixed}


def start(
    namespace: str, command: Sequence[str], env: Mapping[str, str], *, hosts: str = "", pipes: bool = False
) -> subprocess.Popen[bytes]:
    """Start a command in a namespace, with `hosts` as its /etc/hosts. With `pipes`, the caller reads what it prints."""
    entered = ["sh", "-c", ENTER, hosts, *command] if hosts else list(command)
    output = subprocess.PIPE if pipes else None
    return subprocess.Popen(
        [find("ip"), "netns", "exec", namespace, *entered],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        bufsize=0,
        start_new_session=True,
        preexec_fn=dies_with(os.getpid()),
    )


def dies_with(parent: int) -> Callable[[], None]:
    def ask() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the kernel was asked
            os._exit(1)

    return ask


def send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """A signal to a process and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """As a shell counts: 128 and the signal, for one that a signal ended. None while it runs."""
    code = process.poll()
    return 128 - code if code is not None and code < 0 else code
