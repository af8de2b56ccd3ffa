"""FSDP2 over all ranks of several hosts: exact within a host, the codec between, residuals of a place's rows."""

from __future__ import annotations

from typing import Any

import faults
import pytest
import sharded
import torch
import torch.distributed as dist
import trained
from hosted import in_phase, launched
from ranks import play, run
from sharded import STACK, stack
from trained import CODEC, STEPS, average, exempt, given

import narrowcast as nc
from cases import same_bits
from narrowcast import distributed as ncd

pytestmark = pytest.mark.timeout(180)

HOSTS, LOCAL = 2, 2


def default(rank: int) -> Any:
    launched(rank, HOSTS, LOCAL)
    found = {}
    for name, options in (
        ("by hosts", {}),
        ("gathered", {"gather": "raw"}),
        ("flat", {"process_group": dist.group.WORLD}),
        ("no feedback", {"error_feedback": False}),
    ):
        module = stack()
        state = trained.compressed(module, **options)
        found[name] = sharded.steps(module, rank), state.state_dict(), state.stats()
    return found


def gathered(rank: int) -> Any:
    """What forward computes with, by hosts and flat, and how it got there."""
    launched(rank, HOSTS, LOCAL)
    found = []
    options: dict[str, Any]
    for options in ({}, {"process_group": dist.group.WORLD}):
        torch.manual_seed(rank)
        module: Any = stack()
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter.to_local())
        state = nc.compress_gradients(module, "int8", gather="int4", **options)
        ncd.reset_stats()
        for part in sharded.every(module):
            part.unshard()
        seen = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        found.append((seen, state.stats().gather_sent_bytes, dict(ncd.stats())))
    return found


def resumed(rank: int) -> Any:
    launched(rank, HOSTS, LOCAL)
    module = stack()
    state = trained.compressed(module, "int4:stochastic=true")
    sharded.steps(module, rank, 2)
    saved = state.state_dict()
    right = sharded.steps(module, rank, 1, first=2)
    other = stack()
    loaded = trained.compressed(other, "int4:stochastic=true", seed=99)
    loaded.load_state_dict(saved)
    again = sharded.steps(other, rank, 1, first=2)
    flat = trained.compressed(stack(), "int4:stochastic=true", process_group=dist.group.WORLD)
    error, _ = faults.error_of(lambda: flat.load_state_dict(saved))
    return all(same_bits(right[0][name], again[0][name]) for name in right[0]), str(error)


def overflowing(rank: int) -> Any:
    """A step that is not finite on one rank leaves residuals as they were, on all."""
    launched(rank, HOSTS, LOCAL)
    module, plain = stack(), stack()
    trained.compressed(module), trained.compressed(plain)
    same = []
    for step in range(3):
        gradients = given(STACK, rank, step)
        if step == 1:
            bad = {name: gradient.clone() for name, gradient in gradients.items()}
            bad["second.odd"][7, 5] = float("inf") if rank == 1 else 1.0
            sharded.backward(module, bad)
        one, two = sharded.backward(module, gradients), sharded.backward(plain, gradients)
        same.append(all(same_bits(one[name], two[name]) for name in one))
    return same


def failing(rank: int) -> Any:
    launched(rank, HOSTS, LOCAL)
    found = []
    for phase in (1, 2):
        module = stack()
        trained.compressed(module)
        sharded.steps(module, rank, 1)
        if rank == 2:
            in_phase(phase, faults.run_out_of_memory)
        error, _ = faults.error_of(lambda module=module: sharded.steps(module, rank, 1, first=1))
        found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    scenes = default, gathered, resumed, overflowing, failing
    return run(HOSTS * LOCAL, play, {scene.__name__: scene for scene in scenes}, timeout=150)


class Expected:
    """What ranks must end with: a host sums rows, and each place is a world of its own, whose ranks are hosts."""

    def __init__(self) -> None:
        self.places = [sharded.Expected(nc.codec(CODEC), HOSTS, True) for _ in range(LOCAL)]

    def step(self, step: int) -> trained.Named:
        gradients = [given(STACK, rank, step) for rank in range(HOSTS * LOCAL)]
        return {name: self._of(name, [of_rank[name] for of_rank in gradients]) for name in STACK}

    def _of(self, name: str, of_ranks: list[torch.Tensor]) -> torch.Tensor:
        ranks = len(of_ranks)
        matrices = [sharded.padded(one, ranks) for one in of_ranks]
        sums = [average(matrices[host * LOCAL : (host + 1) * LOCAL], 1) for host in range(HOSTS)]
        result = torch.empty_like(sums[0])
        for place, expected in enumerate(self.places):
            rows = slice(place, None, LOCAL)
            mine = [total[rows].contiguous() for total in sums]
            if exempt(of_ranks[0].shape, ranks):
                result[rows] = average(mine, ranks)
            else:
                part = mine[0].shape[1]
                numel = sum(max(0, min(part, of_ranks[0].numel() - r * part)) for r in range(place, ranks, LOCAL))
                result[rows] = expected._compressed(name, numel, mine, expected.codec) / ranks
        return result.reshape(-1)[: of_ranks[0].numel()].view(of_ranks[0].shape)


@pytest.mark.parametrize("name", ["by hosts", "gathered"])
def test_gradients_are_those_of_the_model_and_residuals_those_of_a_place(name: str, four: list[dict[str, Any]]) -> None:
    expected = Expected()
    right = [expected.step(step) for step in range(STEPS)]
    for rank in range(HOSTS * LOCAL):
        gradients, state, _ = four[rank]["default"][name]
        trained.agree(gradients, right)
        host, place = divmod(rank, LOCAL)
        holder = {"ranks": 4, "rank": rank, "hosts": HOSTS, "host": host, "place": place, "sharded": True}
        assert {key: state[key] for key in holder} == holder
        kept = expected.places[place].sender
        assert state["sender"].keys() == kept.keys()
        for parameter, residual in kept.items():
            flat = state["sender"][parameter]
            assert same_bits(flat, residual[host].reshape(-1)[: len(flat)]), parameter
    for parameter in expected.places[0].sender:
        sizes = [four[rank]["default"][name][1]["sender"][parameter].numel() for rank in range(LOCAL)]
        assert sum(sizes) == torch.Size(STACK[parameter]).numel()  # a host has all of it, once


def test_world_is_flat_and_the_bytes_between_hosts_are_fewer(four: list[dict[str, Any]]) -> None:
    flat = sharded.Expected(nc.codec(CODEC), 4, True, [trained.SEED] * 4)
    right = [flat.step([given(STACK, rank, step) for rank in range(4)]) for step in range(STEPS)]
    for of_rank in four:
        gradients, state, stats = of_rank["default"]["flat"]
        trained.agree(gradients, right)
        assert state["hosts"] == 0
        by_hosts = of_rank["default"]["by hosts"][2]
        assert by_hosts.sent_bytes < stats.sent_bytes / 2  # of which a third stays within the host
        assert not of_rank["default"]["no feedback"][1]["sender"]


def test_gathered_parameters_have_the_bits_of_the_flat_form_and_reach_a_host_once(four: list[dict[str, Any]]) -> None:
    for of_rank in four:
        (by_hosts, sent, stats), (flat, flat_sent, _) = of_rank["gathered"]
        assert by_hosts.keys() == flat.keys()
        for name in flat:
            assert same_bits(by_hosts[name], flat[name]), name
            assert same_bits(by_hosts[name], four[0]["gathered"][0][0][name]), name
            assert bool(flat[name].any()), name
        assert sent == stats["parameters between hosts"].sent_bytes
        assert sent < flat_sent / 2.5  # to one rank, not to three


def test_a_resumed_run_is_exact_and_its_state_is_not_one_of_equal_ranks(four: list[dict[str, Any]]) -> None:
    for rank, of_rank in enumerate(four):
        same, error = of_rank["resumed"]
        assert same
        assert f"taken by rank {rank} of 4 (place" in error
        assert "process_group=dist.group.WORLD" in error


def test_a_step_that_overflows_on_one_rank_leaves_no_residuals_on_any(four: list[dict[str, Any]]) -> None:
    for of_rank in four:
        assert of_rank["overflowing"] == [True] * 3


def test_a_rank_that_raises_in_any_phase_is_known_to_all(four: list[dict[str, Any]]) -> None:
    for phase in range(2):
        for rank, of_rank in enumerate(four):
            text = of_rank["failing"][phase]
            assert "MemoryError: no room left for codes" in text, (phase, rank, text)
            assert rank == 2 or "rank 2 failed in it" in text
