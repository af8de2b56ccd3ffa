"""A delay line in user space, for kernels without netem: reads packets from a TAP interface, writes them back later.

The switch's ports send it every packet that a rank sent, and the switch takes what it writes as coming from the ranks.
Addresses say who sent a packet to whom: it waits half of both delays. Packets of equal delays leave in the order they
came. They keep TCP's large form, up to 44 frames in one, so Python keeps up: 4 ranks that each sent and received at
1 Gbit/s took 60% of a core. When it cannot, its interface's queue fills and drops. With loss, packets are single
frames, and each is dropped by a draw of its own.

It runs as a script of its own, in the switch's namespace: `python line.py LOSS SECONDS...`, with the delay of each
rank. It prints "ready", and ends when killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
from heapq import heappop, heappush
from random import Random
from time import monotonic

NAME = b"line"
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TAP, NO_PACKET_INFO, VNET_HEADER = 0x0002, 0x1000, 0x4000
CHECKSUM, TSO4, TSO6 = 1, 2, 4
LARGEST = 65_600  # a packet of 64 KB and its headers; beyond 128 KB, malloc would map and unmap pages for every packet
TO, FROM = 10 + 5, 10 + 11  # behind 10 bytes of the kernel's own, the last bytes of two addresses: a rank, and one
AT_ONCE = 16  # reads between writes, so that neither side waits for a burst of the other


def attach() -> int:
    line = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(line, TUNSETIFF, struct.pack("16sH22x", NAME, TAP | NO_PACKET_INFO | VNET_HEADER))
    # Without these the kernel would cut every packet into frames and fill in checksums, one by one.
    fcntl.ioctl(line, TUNSETOFFLOAD, CHECKSUM | TSO4 | TSO6)
    return line


def relay(line: int, loss: float, delays: list[float]) -> None:
    held: list[tuple[float, int, bytes]] = []
    halves, count, draw = [delay / 2 for delay in delays], 0, Random(0).random
    while True:
        select.select([line], [], [], max(0.0, held[0][0] - monotonic()) if held else None)
        with contextlib.suppress(BlockingIOError):
            for _ in range(AT_ONCE):
                packet = os.read(line, LARGEST)
                if loss and draw() < loss:
                    continue
                count += 1
                heappush(held, (monotonic() + halves[packet[TO] - 1] + halves[packet[FROM] - 1], count, packet))
        now = monotonic()
        while held and held[0][0] <= now:
            with contextlib.suppress(OSError):  # an interface that is down, or being taken away, loses packets
                os.write(line, heappop(held)[2])


def main() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)  # a late relay is a longer cable
    line = attach()
    print("ready", flush=True)
    relay(line, float(sys.argv[1]), [float(delay) for delay in sys.argv[2:]])


if __name__ == "__main__":
    main()
