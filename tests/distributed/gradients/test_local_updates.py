"""Ranks that train alone and meet: what their parameters are, to the bit, and what it takes."""

from __future__ import annotations

from typing import Any

import hosted
import pytest
import torch
import torch.distributed as dist
import trained
from meeting_runs import RATE, Sites, made, same_on_all_ranks, vector
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc

pytestmark = pytest.mark.timeout(180)

SHAPES, STEPS, WARMUP = trained.SHAPES, 11, 2
EVERY = [3, 2, 4]
MEETS_AFTER = {5, 7, 11}
"""With a warm-up of two steps."""


def _expected(world: int, codec: str, local: int, outer: tuple[float, float]) -> list[list[trained.Named]]:
    """The parameters of each rank after each step."""
    feedback = 1 <= nc.codec(codec).format.bits < 8
    if local:
        reducer: Any = hosted.HostExpected(nc.codec(codec), world // local, local, feedback)
        plain: Any = hosted.HostExpected(nc.codec("raw"), world // local, local, False)
    else:
        reducer = trained.Expected(nc.codec(codec), world, feedback)
        plain = trained.Expected(nc.codec("raw"), world, False)
    sites, after = Sites(SHAPES, reducer, world, outer), []
    for step in range(STEPS):
        given = [trained.given(SHAPES, rank, step) for rank in range(world)]
        if step < WARMUP:
            sites.step_with(plain.step(given))
        else:
            sites.step(given)
        if step + 1 in MEETS_AFTER:
            sites.meet()
        after.append([dict(site) for site in sites.sites])
    return after


def _trained(
    rank: int, codec: str, hosts: int = 0, outer: tuple[float, float] = (1.0, 0.0), buckets: float = trained.FEW
) -> list[trained.Named]:
    mesh = None
    if hosts < 0:
        mesh = init_device_mesh("cpu", (-hosts, 2))
    elif hosts:
        hosted.launched(rank, hosts, 2)
    ddp = DDP(trained.Given(SHAPES), bucket_cap_mb=buckets)
    optimizer = torch.optim.SGD(ddp.parameters(), RATE)
    options = {"outer_lr": outer[0], "outer_momentum": outer[1], "process_group": mesh}
    nc.compress_gradients(ddp, codec, sync_every=EVERY, optimizer=optimizer, warmup_steps=WARMUP, **options)
    after = []
    for step in range(STEPS):
        trained.backward(ddp, trained.given(SHAPES, rank, step))
        optimizer.step()
        after.append(trained.parameters_of(ddp))
    return after


@pytest.mark.parametrize(
    ("codec", "outer"), [("int4", (1.0, 0.0)), ("sign", (1.0, 0.0)), ("int8", (1.0, 0.0)), ("nf4:block=32", (0.7, 0.9))]
)
def test_ranks_step_alone_and_end_each_interval_with_the_average_of_their_changes(
    codec: str, outer: tuple[float, float]
) -> None:
    meant = _expected(3, codec, 0, outer)
    for rank, found in enumerate(run(3, _trained, codec, 0, outer)):
        trained.agree(found, [of_step[rank] for of_step in meant])


@pytest.mark.parametrize("hosts", [2, -2], ids=["torchrun", "mesh"])
def test_changes_travel_between_hosts_as_gradients_do(hosts: int) -> None:
    meant = _expected(4, "int4", 2, (1.0, 0.0))
    for rank, found in enumerate(run(4, _trained, "int4", hosts)):
        trained.agree(found, [of_step[rank] for of_step in meant])


def test_what_a_meeting_gives_does_not_depend_on_ddps_buckets() -> None:
    meant = _expected(2, "int4", 0, (1.0, 0.0))
    for rank, found in enumerate(run(2, _trained, "int4", 0, (1.0, 0.0), 25.0)):
        trained.agree(found, [of_step[rank] for of_step in meant])


def _without_a_codec(rank: int) -> Any:
    ddp, optimizer, state = made(None, 4)
    trained.train(ddp, rank, range(8), optimizer)
    return same_on_all_ranks(ddp), str(state)


def test_without_a_codec_torch_adds_up() -> None:
    for same, line in run(2, _without_a_codec):
        assert same
        assert "2 meetings" in line
        assert "codec=None" in line


def _counted(rank: int) -> Any:
    ddp, optimizer, state = made("int8", 5, warmup_steps=1)
    seen = []
    for step in range(12):
        before = nc.distributed.stats()["gradients"].sent_bytes if step else 0
        trained.train(ddp, rank, range(step, step + 1), optimizer)
        seen.append(nc.distributed.stats()["gradients"].sent_bytes - before)
    stats, numel = state.stats(), vector(ddp).numel()
    return seen, (stats.steps, stats.meetings, stats.sent_bytes, stats.plain_bytes), numel, stats


def test_nothing_travels_between_meetings_and_stats_say_so() -> None:
    for seen, (steps, meetings, sent, plain), numel, stats in run(2, _counted):
        assert [step for step, nbytes in enumerate(seen) if nbytes] == [0, 5, 10]
        assert (steps, meetings) == (12, 2)
        assert plain == 12 * 4 * numel  # two ranks: 2 * (2 - 1) / 2 of all bytes
        assert sent < plain / 4
        assert stats.ratio > 4
        assert stats.exposed_seconds > 0
        assert stats.scalars()["meetings"] == 2
        assert "12 steps, 2 meetings, " in str(stats)


class _Odd(nn.Module):
    """Tied weights, a frozen one, one that DDP ignores, one of bf16, one that a rank may leave out, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(24, 24)
        self.b = nn.Linear(24, 24)
        self.b.weight = self.a.weight
        self.frozen = nn.Parameter(torch.ones(24, 24), requires_grad=False)
        self.brief = nn.Parameter(torch.randn(24, 24, generator=torch.Generator().manual_seed(1)).bfloat16())
        self.ignored = nn.Parameter(torch.ones(24))
        self.sometimes = nn.Linear(24, 24)
        self.norm = nn.BatchNorm1d(24)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        y = self.norm(self.b(self.a(x).tanh()) + x @ self.frozen * self.ignored)
        y = y + x @ self.brief.float()
        return self.sometimes(y) if use else y


def _odd(rank: int, broadcast: bool) -> Any:
    torch.manual_seed(0)
    model = _Odd()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["ignored"])
    ddp = DDP(model, find_unused_parameters=True, broadcast_buffers=broadcast)
    groups = [{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(model.parameters()) if p.requires_grad]
    optimizer = torch.optim.AdamW(groups, 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = nc.compress_gradients(ddp, "int8", sync_every=3, optimizer=optimizer)
    frozen = model.frozen.detach().clone()
    for step in range(6):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(17 * step + rank))
        optimizer.zero_grad()
        ddp(x, use=rank == 0).square().mean().backward()
        optimizer.step()
        schedule.step()
    assert model.b.weight is model.a.weight
    assert torch.equal(model.frozen, frozen)
    named = {name: tensor.detach().float() for name, tensor in model.state_dict().items()}
    return named, sorted(state.meetings.parameters), [g["lr"] / g["initial_lr"] for g in optimizer.param_groups]


@pytest.mark.parametrize("broadcast", [True, False])
def test_parameters_of_all_sorts_end_alike_and_those_that_ddp_leaves_alone_stay_apart(broadcast: bool) -> None:
    (one, names, rates), (other, _, _) = run(2, _odd, broadcast)
    assert names == sorted(
        ["a.weight", "a.bias", "b.bias", "brief", "sometimes.weight", "sometimes.bias", "norm.weight", "norm.bias"]
    )
    assert rates == [pytest.approx(0.1**3)] * (len(names) + 1)  # and the ignored one
    for name in one:
        buffer = name in ("norm.running_mean", "norm.running_var")
        # DDP copies rank 0's buffers before a forward; after the last one each rank has moved its own.
        assert torch.equal(one[name], other[name]) == (name != "ignored" and not buffer), name


def _sgd_of_averages(rank: int) -> Any:
    """Meeting after every step of plain SGD is what DDP does with averaged gradients, but for rounding."""
    ddp, plain = (DDP(trained.mlp(width=40)) for _ in range(2))
    one, other = (torch.optim.SGD(each.parameters(), RATE) for each in (ddp, plain))
    nc.compress_gradients(ddp, "raw", sync_every=1, optimizer=one)
    trained.train(ddp, rank, range(20), one)
    trained.train(plain, rank, range(20), other)
    return vector(ddp), vector(plain)


def test_meeting_after_every_step_of_sgd_is_ddp() -> None:
    for met, plain in run(3, _sgd_of_averages):
        assert (met - plain).abs().max() < 1e-5  # 20 steps, each rounded a few times at values below 4: 2**-22 each
        assert not torch.equal(met, torch.zeros_like(met))


def _learned(rank: int, every: Any, codec: Any) -> float:
    ddp, optimizer, state = made(codec, every)
    trained.train(ddp, rank, range(160), optimizer)
    state.sync()
    with torch.no_grad():
        losses = [
            (ddp.module(x) - x[:, :4].sin()).square().mean()
            for x in (trained.batch(r, s) for r in (0, 1) for s in range(99, 119))
        ]
    assert same_on_all_ranks(ddp)
    return float(torch.stack(losses).mean())


def test_four_bits_with_feedback_train_as_well_as_changes_without_loss() -> None:
    plain, int4 = run(2, _learned, 5, None)[0], run(2, _learned, 5, "int4")[0]
    first = trained.mlp(width=40)
    with torch.no_grad():
        x = torch.cat([trained.batch(r, s) for r in (0, 1) for s in range(99, 119)])
        start = float((first(x) - x[:, :4].sin()).square().mean())
    assert plain < start / 2
    assert int4 < start / 2


def _on_one_rank(rank: int) -> Any:
    ddp = DDP(trained.mlp(width=40))
    optimizer = torch.optim.SGD(ddp.parameters(), RATE)
    state = nc.compress_gradients(ddp, "int4", sync_every=3, optimizer=optimizer, outer_lr=0.5)
    start = vector(ddp)
    trained.train(ddp, rank, range(2), optimizer)
    moved = vector(ddp)
    trained.train(ddp, rank, range(2, 3), optimizer)
    return start, moved, vector(ddp), str(state), dist.get_world_size()


def test_one_rank_sends_nothing_and_takes_the_outer_step() -> None:
    ((start, moved, met, line, _),) = run(1, _on_one_rank)
    assert "1 meeting, nothing sent" in line
    assert (met - start).norm() < (moved - start).norm()


def _auto(rank: int) -> Any:
    ddp, optimizer, state = made("auto", 2)
    trained.train(ddp, rank, range(4), optimizer)
    return same_on_all_ranks(ddp), state.plan is not None, state.meetings.count


def test_the_codec_may_be_chosen_by_the_link() -> None:
    assert run(2, _auto) == [(True, True, 2)] * 2


def _compiled(rank: int) -> Any:
    ddp = DDP(trained.mlp(width=40))
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.01)
    model = torch.compile(ddp, backend="eager")
    nc.compress_gradients(model, "int8", sync_every=3, optimizer=optimizer)
    trained.train(model, rank, range(6), optimizer)
    return same_on_all_ranks(ddp)


def test_a_compiled_model_meets_too() -> None:
    assert run(2, _compiled) == [True, True]
