"""A port for a server that a test starts."""

from __future__ import annotations

import contextlib
import random
import socket

# Below those that Linux gives to whoever asks for any (/proc/sys/net/ipv4/ip_local_port_range): the tests beside this
# one open many connections between the choice and the server's start.
CHOICE = range(10_000, 16_000)


def free_port() -> int:
    while True:
        port = random.SystemRandom().choice(CHOICE)  # a seeded one chooses the same port in every worker
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
