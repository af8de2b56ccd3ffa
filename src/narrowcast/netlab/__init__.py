"""A network in a box: every rank a machine of its own, on cables of a known rate and delay, inside one Linux machine.

    narrowcast netlab --ranks 4 --rate 1gbit --delay 1ms -- python train.py

Each rank is a process in its own network namespace with one interface, `eth0`. Its cable ends in a switch: a bridge in
a namespace of its own. So nothing of a run shows on the machine's own network, runs cannot meet, and no packet leaves
the machine. What must hold, whoever implements it:

- A rank sends at most its `rate` and receives at most that, both at once; senders to one rank share its rate evenly.
- A packet takes half of its sender's `delay` and half of its receiver's: with one delay for all, a round trip takes
  twice that.
- A packet between two ranks is lost with the probability `loss`, each by itself. Packets are single frames then.
- Each rank finds the variables that torchrun sets, so `init_process_group("gloo")` needs no argument.
- Nothing outlives a run: no process, no namespace. What a killed run left behind, the next one removes.

With `--per-host 2`, two ranks share a namespace, its cable and its counters, and reach each other by loopback, as ranks
of a host do. Rates and delays are then those of hosts.

Not done: jitter, routes to the outside, limits on the ranks' processors.
"""

from __future__ import annotations

from .counters import Counters, read
from .errors import NetlabError
from .network import Network

__all__ = ["Counters", "NetlabError", "Network", "read"]
