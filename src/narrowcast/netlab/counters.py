"""What passed an interface, by the kernel's count, as its namespace sees it: `tx` is what the rank sent.

A rank reads its own with `read()`; the difference of two readings is what passed between them. Bytes are those of the
packets that TCP handed over, with one header for each: over the payload by a few percent at the most, and under the
wire, where each 1,448 bytes of payload carry 66 of headers.
"""

from __future__ import annotations

import os
from dataclasses import astuple, dataclass
from pathlib import Path

INTERFACE = "eth0"


@dataclass(frozen=True)
class Counters:
    """Dropped packets are those that the interface or, where netlab itself reads, its queues had no room for."""

    tx_bytes: int = 0
    tx_packets: int = 0
    tx_dropped: int = 0
    rx_bytes: int = 0
    rx_packets: int = 0
    rx_dropped: int = 0

    def __sub__(self, before: Counters) -> Counters:
        return Counters(*(a - b for a, b in zip(astuple(self), astuple(before), strict=True)))


def read(interface: str | None = None) -> Counters:
    """This process's interface: NETLAB_IFNAME, which netlab sets, unless another is named."""
    interface = interface or os.environ.get("NETLAB_IFNAME", INTERFACE)
    # /proc/net belongs to the namespace of the reader. /sys does only where it was mounted again inside.
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, colon, figures = line.partition(":")
        if colon and name.strip() == interface:
            rx_bytes, rx_packets, _, rx_dropped, *_, tx_bytes, tx_packets, _, tx_dropped = map(
                int, figures.split()[:12]
            )
            return Counters(tx_bytes, tx_packets, tx_dropped, rx_bytes, rx_packets, rx_dropped)
    raise LookupError(
        f"this process's network has no interface {interface!r}; a rank that netlab started has {INTERFACE!r}"
    )
