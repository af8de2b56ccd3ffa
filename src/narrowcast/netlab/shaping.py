"""Link to tc: the lines that give an interface its rate, and what delays packets on the way.

The rate holds twice. Leaving a rank, a token bucket (tbf) on its `eth0`. Towards it, on the switch's port, a class tree
(htb) with one queue per sender: in a plain queue without delay, one of three senders took 700 to 900 of 956 Mbit/s, and
which one was chance. Queues are counted in bytes and long enough that TCP fills the link without loss.

Delay and loss are the kernel's netem where the kernel has it, in each sender's queue of the port. Where it has not
(many virtual machines), packets that reach a port are sent through a delay line in user space instead (line.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .link import FRAME, Link, pair_delay

HINT = (
    "The kernel may lack a part. As root, on a kernel with modules: "
    "`modprobe -a veth bridge sch_tbf sch_htb cls_u32 act_mirred sch_netem tun`."
)
LINE = "line"
UNLIMITED = 10**11  # bits a second, where queues are needed but no rate is asked for


def sending(link: Link, interface: str) -> Iterator[str]:
    """tc lines for a rank's own interface."""
    if link.rate:
        # A machine's own queue holds its senders back instead of dropping; room for several streams comes close.
        limit = 4 * link.queue
        yield f"qdisc add dev {interface} root tbf rate {link.rate}bit burst {link.burst}b limit {limit}b"


def receiving(links: Sequence[Link], rank: int, addresses: Sequence[str], *, netem: bool) -> Iterator[str]:
    """tc lines for the switch's port to a rank; `links` and `addresses` are those of all ranks."""
    link, port = links[rank], f"port{rank}"
    delays = {pair_delay(link, other) for other in links}
    if not link.rate and (not netem or len(delays) == 1):
        if netem:
            yield f"qdisc add dev {port} root {late(link, max(delays))}"
        return
    rate = link.rate or UNLIMITED
    packet = link.frames * FRAME
    whole = f"ceil {rate}bit cburst {link.burst}b quantum {packet}"
    # What no filter knows (there should be nothing: neighbours are permanent, IPv6 is off) passes unshaped.
    yield f"qdisc add dev {port} root handle 1: htb default 0"
    yield f"class add dev {port} parent 1: classid 1:1 htb rate {rate}bit burst {link.burst}b {whole}"
    for sender, address in enumerate(addresses):
        share = rate // len(addresses)
        queue = f"1:{sender + 2:x}"
        waits = late(link, pair_delay(link, links[sender])) if netem else f"bfifo limit {link.queue}"
        yield f"class add dev {port} parent 1:1 classid {queue} htb rate {share}bit burst {packet}b {whole}"
        yield f"qdisc add dev {port} parent {queue} {waits}"
        yield f"filter add dev {port} parent 1: protocol ip u32 match ip src {address}/32 flowid {queue}"


def late(link: Link, delay: float) -> str:
    """netem's words for a queue towards a rank."""
    lost = f" loss {link.loss * 100:g}%" if link.loss else ""
    return f"netem delay {round(delay * 1e6)}us{lost} limit {waiting(link, delay)}"


def waiting(link: Link, delay: float) -> int:
    """netem counts its queue in packets, of one frame at the least. An unlimited link: 10 Gbit/s' worth."""
    rate = link.rate or 10**10
    return max(1000, int(max(link.queue, rate / 8 * 2 * delay) / FRAME))


def through_line(port: str) -> Iterator[str]:
    """tc lines that send what a rank sent to the delay line, before the switch sees it."""
    yield f"qdisc add dev {port} clsact"
    yield f"filter add dev {port} ingress protocol all u32 match u32 0 0 action mirred egress redirect dev {LINE}"
