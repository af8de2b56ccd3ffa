"""Link to tc: the lines that give an interface its rate, and what delays packets on the way.

The rate holds twice: leaving a rank, on its `eth0`, and towards it, on the switch's port. Either is a class tree (htb)
with one queue per rank at the other end, as Linux's own fq_codel keeps one per stream. In one queue for all, without
delay, one of three senders took 700 to 900 of the 956 Mbit/s towards a rank, and which one was chance; of what leaves a
rank, the stream that came last was behind by a whole chunk of a reduction. Queues are counted in bytes and long enough
that TCP fills the link without loss.

Delay and loss are the kernel's netem where the kernel has it, in each sender's queue of the port. Where it has not
(many virtual machines), packets that reach a port are sent through a delay line in user space instead (line.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .link import FRAME, Link, pair_delay

HINT = (
    "The kernel may lack a part. As root, on a kernel with modules: "
    "`modprobe -a veth bridge sch_htb cls_u32 act_mirred sch_netem tun`."
)
LINE = "line"
UNLIMITED = 10**11  # bits a second, where queues are needed but no rate is asked for


def sending(link: Link, interface: str, addresses: Sequence[str]) -> Iterator[str]:
    """tc lines for a rank's own interface; `addresses` are those of all ranks."""
    if link.rate:
        # A machine's own queue holds its senders back instead of dropping; room for several streams comes close.
        yield from queues(link, interface, "dst", addresses, [f"bfifo limit {4 * link.queue}"] * len(addresses))


def receiving(links: Sequence[Link], rank: int, addresses: Sequence[str], *, netem: bool) -> Iterator[str]:
    """tc lines for the switch's port to a rank; `links` and `addresses` are those of all ranks."""
    link, port = links[rank], f"port{rank}"
    delays = [pair_delay(link, other) for other in links]
    if not link.rate and (not netem or len(set(delays)) == 1):
        if netem:
            yield f"qdisc add dev {port} root {late(link, max(delays))}"
        return
    waits = [late(link, delay) if netem else f"bfifo limit {link.queue}" for delay in delays]
    yield from queues(link, port, "src", addresses, waits)


def queues(link: Link, interface: str, end: str, addresses: Sequence[str], waits: Sequence[str]) -> Iterator[str]:
    """tc lines for a rate that ranks share evenly: a queue of the kind `waits[i]` for packets with `addresses[i]`.

    `end` is the address of a packet that is looked at: "src" or "dst".
    """
    rate = link.rate or UNLIMITED
    packet = link.frames * FRAME
    whole = f"ceil {rate}bit cburst {link.burst}b quantum {packet}"
    share = rate // len(addresses)
    # What no filter knows (there should be nothing: neighbours are permanent, IPv6 is off) passes unshaped.
    yield f"qdisc add dev {interface} root handle 1: htb default 0"
    yield f"class add dev {interface} parent 1: classid 1:1 htb rate {rate}bit burst {link.burst}b {whole}"
    for i, (address, wait) in enumerate(zip(addresses, waits, strict=True)):
        queue = f"1:{i + 2:x}"
        yield f"class add dev {interface} parent 1:1 classid {queue} htb rate {share}bit burst {packet}b {whole}"
        yield f"qdisc add dev {interface} parent {queue} {wait}"
        yield f"filter add dev {interface} parent 1: protocol ip u32 match ip {end} {address}/32 flowid {queue}"


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
