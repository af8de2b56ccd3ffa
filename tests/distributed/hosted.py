"""Ranks that share hosts, for tests: the variables that torchrun sets, and what a reduction by hosts must give."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import faults
import torch
from torch import Tensor
from trained import UNIT, Expected, Named, average, exempt

from narrowcast import Codec
from narrowcast.distributed.transport.group import Group


def launched(rank: int, hosts: int, local: int) -> None:
    """Let this process be one that torchrun has started on one of so many hosts."""
    named = {"LOCAL_WORLD_SIZE": local, "GROUP_RANK": rank // local, "LOCAL_RANK": rank % local}
    os.environ.update({name: str(value) for name, value in named.items()})


def in_phase(phase: int, action: faults.Action, place: str = "encoding") -> None:
    """Do `action` at a place of the phase that is so many ahead: of each sum, 1 is within hosts, 2 between them, 3
    within them again. Phases may run side by side, each in a thread of its own."""
    turn, which = divmod(phase - 1, 3)
    between = which == 1
    left = [turn + 1 if between else 2 * turn + 1 + which // 2]
    plain = Group.carry

    def carry(self: Any, op: str, *args: Any) -> Any:
        if op.endswith("between hosts") if between else "within" in op:
            left[0] -= 1
            if left[0] == 0:
                Group.carry = plain  # type: ignore[method-assign]
                faults.at(place, action, in_this_thread=True)
        return plain(self, op, *args)

    Group.carry = carry  # type: ignore[assignment,method-assign]


class HostExpected:
    """All ranks' steps in one process where `local` of them share each host: what every rank must end with.

    A parameter is a matrix with a row for each rank. Each place on a host has as many rows of it as there are hosts,
    one after the other. Hosts sum in fp32, without loss. Each place is then an `Expected` whose ranks are hosts.
    """

    def __init__(self, codec: Codec, hosts: int, local: int, feedback: Any) -> None:
        self.hosts, self.local = hosts, local
        self.places = [_Place(codec, hosts, local, feedback) for _ in range(local)]

    def step(self, gradients: Sequence[Named]) -> Named:
        found = {}
        for name, like in gradients[0].items():
            of_ranks = [of_rank[name] for of_rank in gradients]
            found[name] = (
                self._exact(of_ranks) if exempt(like.shape, len(of_ranks)) else self._compressed(name, of_ranks)
            )
        return found

    def sums(self, of_ranks: Sequence[Tensor]) -> list[Tensor]:
        """What each host has."""
        each = [list(of_ranks[host * self.local : (host + 1) * self.local]) for host in range(self.hosts)]
        return [average(terms, 1).reshape(-1) for terms in each]

    def _exact(self, of_ranks: Sequence[Tensor]) -> Tensor:
        return average(self.sums(of_ranks), len(of_ranks)).to(of_ranks[0].dtype).view(of_ranks[0].shape)

    def _compressed(self, name: str, of_ranks: Sequence[Tensor]) -> Tensor:
        rows = self.hosts * (-(-of_ranks[0].numel() // (UNIT * len(of_ranks))) * UNIT)
        shares = [total.split(rows) for total in self.sums(of_ranks)]
        done = []
        for place, expected in enumerate(self.places):
            nothing = torch.empty(0)
            mine = [share[place] if place < len(share) else nothing for share in shares]
            expected.part = rows // self.hosts
            done.append(expected.compressed(name, mine))
        return torch.cat(done).to(of_ranks[0].dtype).view(of_ranks[0].shape)

    def state_of(self, host: int, place: int) -> tuple[Named, Named]:
        """The residuals that `state_dict` of a rank must hold: the sender's, and the owner's."""
        expected = self.places[place]
        sender, owner = {}, {}
        for name, numel in expected.numels.items():
            part = expected.owner[name].shape[1]
            owner[name] = expected.owner[name][host, : max(0, min(part, numel - host * part))]
            if expected.feedback is True:
                sender[name] = expected.sender[name][host].reshape(-1)[:numel]
        return sender, owner


class _Place(Expected):
    """What ranks in one place on all hosts do."""

    def __init__(self, codec: Codec, hosts: int, local: int, feedback: Any) -> None:
        super().__init__(codec, hosts, feedback)
        self.cut_by, self.divisor = hosts * local, hosts * local
        self.numels: dict[str, int] = {}

    def compressed(self, name: str, of_hosts: Sequence[Tensor]) -> Tensor:
        self.numels[name] = of_hosts[0].numel()
        return self._compressed(name, of_hosts, self.codec)
