"""`Network`: the namespaces, cables and switch of one run, from `with` to the end of it.

    with Network(ranks=4, rate="1gbit", delay="1ms") as network:
        processes = network.start(["python", "train.py"])
        codes = [process.wait() for process in processes]
        print(network.counters())

Leaving the `with` ends every process in the network and removes all of it, whatever happened inside. Addresses and
neighbours are fixed and IPv6 is off, so the counters hold what the ranks sent and nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from . import owners, permission, processes, shaping
from .commands import run
from .counters import INTERFACE, Counters
from .errors import BrokenNetworkError, NetlabError
from .link import parse_links

MOST = 64  # a port has a queue for every sender, and 64 of each take a second to make
DELAYERS = ("auto", "netem", "line")
# Who is where is known: nothing to learn, and no packet is shown to a rank that it is not for.
ISOLATED = "learning off flood off mcast_flood off bcast_flood off"
# On interfaces yet to come: IPv6 would announce itself and its groups, and the counters would show it.
NO_IPV6 = "! cd /proc/sys/net/ipv6/conf/default 2> /dev/null || echo 1 > disable_ipv6"
TCP_HINT = (
    "--tcp: namespaces take what the machine has (net.ipv4.tcp_available_congestion_control) and allows: "
    'sysctl -w net.ipv4.tcp_allowed_congestion_control="$(sysctl -n net.ipv4.tcp_allowed_congestion_control) {}"'
)
LINE_STARTS = 10  # seconds that the delay line may take to start
_count = itertools.count()


class Network:
    """Ranks on a switch. `delay_by`: netem (the kernel), line (user space) or auto, the first that there is.

    `rate` and `delay` are one for all ranks, or one for each with commas between; `loss` is a percentage.
    `tcp`: how TCP shares a link (congestion control): cubic, reno, bbr; the machine's own unless given. `per_host`: so
    many ranks share a namespace, its cable and its address, and reach each other without the cable.
    """

    def __init__(
        self,
        ranks: int,
        rate: str | None = None,
        delay: str | None = None,
        *,
        loss: str | None = None,
        delay_by: str = "auto",
        tcp: str | None = None,
        per_host: int = 1,
    ) -> None:
        if not 1 <= ranks <= MOST:
            raise NetlabError(f"--ranks {ranks}: there can be 1 to {MOST} of them. Write, for example, --ranks 4.")
        if per_host < 1 or ranks % per_host:
            raise NetlabError(f"--per-host {per_host}: --ranks {ranks} is no multiple of it. Write --per-host 1.")
        if delay_by not in DELAYERS:
            raise NetlabError(f"--delay-by {delay_by!r}: it is one of {', '.join(DELAYERS)}.")
        self.ranks, self.per_host = ranks, per_host
        hosts = range(ranks // per_host)
        self.links = parse_links(len(hosts), rate, delay, loss)
        relayed = any(link.delay or link.loss for link in self.links)
        self.delay_by = delay_by if relayed else "nothing"
        self.addresses = [f"10.77.0.{host + 1}" for host in hosts]
        self.swept: list[str] = []
        prefix = owners.prefix(next(_count))
        self.switch = f"{prefix}switch"
        self.namespaces = [f"{prefix}{host}" for host in hosts]
        self.tcp = tcp
        self._processes: list[subprocess.Popen[bytes]] = []
        self._line: subprocess.Popen[bytes] | None = None

    # -- from here to there --------------------------------------------------------------------------------------------

    def __enter__(self) -> Network:
        permission.require()
        self.swept = owners.sweep()
        try:
            self._build()
        except BaseException:
            with contextlib.suppress(NetlabError):  # the first error says more
                self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process and remove everything. May be called twice."""
        for process in [*self._processes, *([self._line] if self._line else [])]:
            processes.send(process, signal.SIGKILL)
            process.wait()
        own = {self.switch, *self.namespaces}
        owners.remove([name for name in owners.names() if name in own])

    def _build(self) -> None:
        names = [self.switch, *self.namespaces]
        run("ip", lines=[f"netns add {name}" for name in names], hint=permission.refused())
        for name in names:
            run("ip", "netns", "exec", name, "sh", "-c", NO_IPV6)
            if self.tcp:
                set_it = f"echo {shlex.quote(self.tcp)} > /proc/sys/net/ipv4/tcp_congestion_control"
                run("ip", "netns", "exec", name, "sh", "-c", set_it, hint=TCP_HINT.format(self.tcp))
        ports = range(len(self.namespaces))
        lines = ["link add switch type bridge stp_state 0 mcast_snooping 0", "link set switch up"]
        for rank, name in enumerate(self.namespaces):
            cable = f"link add port{rank} type veth peer name {INTERFACE} address {mac(rank)} netns {name}"
            lines += [cable, f"link set port{rank} master switch up"]
        lines += [f"link set port{rank} type bridge_slave {ISOLATED}" for rank in ports]
        run("ip", namespace=self.switch, lines=lines, hint=shaping.HINT)
        places = [f"fdb add {mac(rank)} dev port{rank} master static" for rank in ports]
        run("bridge", namespace=self.switch, lines=places, hint=shaping.HINT)
        for rank in ports:
            self._furnish(rank)
        self._shape()

    def _furnish(self, rank: int) -> None:
        others = [other for other in range(len(self.namespaces)) if other != rank]
        lines = [
            "link set lo up",
            f"link set {INTERFACE} gso_max_segs {min(link.frames for link in self.links)}",
            f"addr add {self.addresses[rank]}/24 dev {INTERFACE}",
            f"link set {INTERFACE} up",
            *(f"neigh add {self.addresses[i]} lladdr {mac(i)} dev {INTERFACE} nud permanent" for i in others),
        ]
        run("ip", namespace=self.namespaces[rank], lines=lines, hint=shaping.HINT)

    def _hosts(self) -> str:
        """The ranks' names: "rank0" and so on. torch asks for them, and warns where there is no answer."""
        known = Path("/etc/hosts").read_text() if Path("/etc/hosts").exists() else "127.0.0.1 localhost"
        # Each once more as IPv6 writes it: torch's store listens for both, and sees its callers so.
        places = [(rank, self.addresses[rank // self.per_host]) for rank in range(self.ranks)]
        own = [f"{address} rank{rank}\n::ffff:{address} rank{rank}.v4" for rank, address in places]
        return "\n".join([known, *own, ""])

    # -- rate and delay ------------------------------------------------------------------------------------------------

    def _shape(self) -> None:
        if self.delay_by == "auto":
            self.delay_by = "netem" if self._has_netem() else "line"
        if self.delay_by == "line":
            self._start_line()
        lines: list[str] = []
        for rank in range(len(self.namespaces)):
            lines += shaping.receiving(self.links, rank, self.addresses, netem=self.delay_by == "netem")
            lines += shaping.through_line(f"port{rank}") if self.delay_by == "line" else []
        if lines:
            run("tc", namespace=self.switch, lines=lines, hint=shaping.HINT)
        for name, link in zip(self.namespaces, self.links, strict=True):
            if lines := list(shaping.sending(link, INTERFACE, self.addresses)):
                run("tc", namespace=name, lines=lines, hint=shaping.HINT)

    def _has_netem(self) -> bool:
        try:
            run("tc", "qdisc", "add", "dev", "switch", "root", "netem", "delay", "1ms", namespace=self.switch)
        except NetlabError:
            return False
        run("tc", "qdisc", "del", "dev", "switch", "root", namespace=self.switch)
        return True

    def _start_line(self) -> None:
        figures = [self.links[0].loss, *(link.delay for link in self.links)]
        command = [sys.executable, "-I", str(Path(__file__).with_name("line.py")), *map(str, figures)]
        self._line = processes.start(self.switch, command, os.environ, pipes=True)
        out, err = self._line.stdout, self._line.stderr
        assert out is not None
        assert err is not None
        ready, _, _ = select.select([out], [], [], LINE_STARTS)
        if not ready or out.readline() != b"ready\n":
            processes.send(self._line, signal.SIGKILL)
            said = err.read().decode(errors="replace").strip().splitlines()[-1:]
            raise NetlabError(f"--delay: the delay line did not start: {' '.join(said)}\n{shaping.HINT}")
        lines = [
            f"link set {shaping.LINE} txqueuelen 10000",
            f"link set {shaping.LINE} master switch up",
        ]
        lines += [f"link set {shaping.LINE} type bridge_slave {ISOLATED}"]
        run("ip", namespace=self.switch, lines=lines, hint=shaping.HINT)

    # -- use -----------------------------------------------------------------------------------------------------------

    def start(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, *, pipes: bool = False
    ) -> list[subprocess.Popen[bytes]]:
        """The command in every rank, in order of rank. `env` comes on top of this process's own environment."""
        given = {**os.environ, **(env or {})}
        begun = []
        for rank in range(self.ranks):
            own = processes.variables(rank, self.addresses, given, self.per_host)
            name = self.namespaces[rank // self.per_host]
            begun.append(processes.start(name, command, own, hosts=self._hosts(), pipes=pipes))
            self._processes.append(begun[-1])
        return begun

    def check(self) -> None:
        """Raise if the network itself has stopped."""
        if self._line and self._line.poll() is not None:
            raise BrokenNetworkError(
                "the delay line ended, so no packet arrives any more. Was it killed, for memory perhaps?"
            )

    def counters(self) -> list[Counters]:
        """What passed each host's interface since the start; drops in the queues of its cable included."""
        towards = queue_drops(self.switch)
        found = []
        for rank, name in enumerate(self.namespaces):
            shown = json.loads(run("ip", "-s", "-j", "link", "show", "dev", INTERFACE, namespace=name))[0]["stats64"]
            tx, rx = shown["tx"], shown["rx"]
            lost = tx["dropped"] + queue_drops(name).get(INTERFACE, 0), rx["dropped"] + towards.get(f"port{rank}", 0)
            found.append(Counters(tx["bytes"], tx["packets"], lost[0], rx["bytes"], rx["packets"], lost[1]))
        return found


def mac(rank: int) -> str:
    """A locally administered address that says whose it is."""
    return f"02:6e:6c:00:00:{rank + 1:02x}"


def queue_drops(namespace: str) -> dict[str, int]:
    """Packets dropped by the queue at the root of each interface, which counts for those below it."""
    queues: list[dict[str, Any]] = json.loads(run("tc", "-s", "-j", "qdisc", "show", namespace=namespace))
    return {queue["dev"]: queue.get("drops", 0) for queue in queues if queue.get("root")}
