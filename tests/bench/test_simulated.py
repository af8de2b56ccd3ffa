"""bench/simulated.py: its fast forms do what plain ones do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
import simulated
import simulated_report
from narrowcast.byte_gpt import ByteGPT, GPTConfig, batches, loss_of, stdlib_text
from narrowcast.distributed.gradients.timetable import Timetable
from simulated_gradients import AllAtOnce, Flat, one_by_one
from simulated_optimizers import BETAS, DECAY, EPS, newton_schulz
from simulated_powersgd import PowerSGD
from simulated_workers import Reduction, Simulation, Way
from training_ranks import warm_cosine

CONFIG = GPTConfig(layers=1, width=24, heads=2, context=16)
STEPS, WORKERS, BATCH = 6, 3, 2


@pytest.fixture
def doubles() -> Iterator[None]:
    """Sums in another order then differ by 1e-16 of their terms, and few steps make no 1e-9 of it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(model(x), y)


def test_all_gradients_at_once_are_those_of_the_workers_one_by_one(doubles: None) -> None:
    flat = Flat(ByteGPT(CONFIG), WORKERS)
    windows = torch.randint(256, (WORKERS * BATCH, 17), generator=torch.Generator().manual_seed(0))
    one_by_one(flat, loss, windows[:, :-1], windows[:, 1:])
    expected = [each.clone() for each in (flat.of_matrices, flat.of_vectors)]
    assert all(bool(each.count_nonzero(1).min() > 0) for each in expected)
    for each in (flat.of_matrices, flat.of_vectors):
        each[:, : flat.numel].fill_(7.0)  # every place is written, not added to
    AllAtOnce(flat, loss)(windows[:, :-1], windows[:, 1:])
    torch.testing.assert_close([flat.of_matrices, flat.of_vectors], expected, rtol=1e-9, atol=1e-12)


def test_a_module_whose_gradients_nobody_can_write_is_refused() -> None:
    with pytest.raises(TypeError, match="Conv1d holds parameters"):
        AllAtOnce(Flat(nn.Conv1d(2, 3, 1), WORKERS), loss)


def plain_average(codec: nc.Codec, feedback: float, terms: Tensor, sender: Tensor, owner: Tensor) -> tuple[Tensor, ...]:
    """The average as every worker ends with it, and the new residuals: one operation after another."""
    part = terms.shape[1] // WORKERS
    meant = terms.view(WORKERS, WORKERS, part) + feedback * sender
    sent = meant.clone()
    for worker in range(WORKERS):
        for at in range(WORKERS):
            if worker != at:
                sent[worker, at] = codec.decode(codec.encode(meant[worker, at]), part)
    sums = sent[0].clone()
    for worker in range(1, WORKERS):
        sums += sent[worker]
    sums = sums / WORKERS + feedback * owner
    result = codec.decode(codec.encode(sums), part)
    return result.view(-1), meant - sent, sums - result


@pytest.mark.parametrize("codec", ["int8", "int3", "sign"])
@pytest.mark.parametrize("feedback", [0.0, 0.5, 1.0])  # powers of two: no product rounds
def test_the_reduction_has_the_bits_of_a_plain_one(codec: str, feedback: float) -> None:
    generator, part = torch.Generator().manual_seed(1), 256
    reduction = Reduction(codec, feedback, torch.zeros(WORKERS, WORKERS * part))
    sender, owner = torch.zeros(WORKERS, WORKERS, part), torch.zeros(WORKERS, part)
    for _ in range(3):
        terms = torch.randn(WORKERS, WORKERS * part, generator=generator)
        expected, sender, owner = plain_average(nc.codec(codec), feedback, terms, sender, owner)
        assert torch.equal(reduction.average(terms.clone()), expected)
    if feedback:
        assert torch.equal(reduction.sender.view_as(sender), sender)
        assert torch.equal(reduction.owner, owner)


def test_residuals_that_are_held_in_a_codec_are_what_it_decodes() -> None:
    terms = torch.randn(WORKERS, WORKERS * 128, generator=torch.Generator().manual_seed(2))
    held, whole = (Reduction("int2", 1.0, terms, codec) for codec in ("int8", ""))
    held.average(terms.clone())
    whole.average(terms.clone())
    codec = nc.codec("int8")
    for there, here in ((held.sender, whole.sender), (held.owner, whole.owner)):
        rows = here.view(-1, 128)
        assert torch.equal(there.view(-1, 128), codec.decode(codec.encode(rows), 128))


def test_a_run_without_a_codec_is_torchs_adamw_on_the_average_gradient(doubles: None) -> None:
    found = Simulation(CONFIG, BATCH, STEPS, WORKERS, "cpu").train(Way(rate=1e-2, seed=3))
    model = ByteGPT(CONFIG, seed=3)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=BETAS, eps=EPS)
    data = [batches(stdlib_text(), CONFIG.context, BATCH, seed=3, rank=rank) for rank in range(WORKERS)]
    simulation = Simulation(CONFIG, BATCH, STEPS, WORKERS, "cpu")
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * warm_cosine(step, STEPS)
        optimizer.zero_grad()
        for rank in data:
            (loss(model, *next(rank)) / WORKERS).backward()
        optimizer.step()
    windows = simulation.windows
    with torch.no_grad():
        expected = float(loss(model, windows[:, :-1], windows[:, 1:]))
    assert found["curve"][-1] == [STEPS, pytest.approx(expected, rel=1e-9)]


def test_a_run_begins_anew_after_another() -> None:
    simulation, way = Simulation(CONFIG, BATCH, STEPS, WORKERS, "cpu"), Way("sign", feedback=1.0, seed=1)
    first = simulation.train(way)
    simulation.train(Way("int2", feedback=1.0, optimizer="sgd", seed=2))
    assert simulation.train(way) == first


@pytest.mark.parametrize(("refresh", "names"), [(0, None), (16, 16), (-1, "growing")])
def test_gradients_travel_when_the_library_sends_them(refresh: int, names: int | str | None) -> None:
    table, way = Timetable(20, "int8", None, names, momentum=True), Way("sign", warmup=0.1, refresh=refresh)
    codec = nc.codec("sign")
    expected = [not table.at(step, codec).momentum for step in range(200)]
    assert [way.travels(step, 200) != "momentum" for step in range(200)] == expected


def test_newton_schulz_leaves_singular_values_near_one() -> None:
    matrices = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(newton_schulz(matrices))
    assert values.min() > 0.5
    assert values.max() < 1.5


def test_powersgd_of_full_rank_loses_nothing_and_a_lower_rank_keeps_the_rest_as_residuals() -> None:
    flat = Flat(nn.Linear(4, 16), WORKERS)
    flat.of_matrices[:, : flat.numel] = torch.randn(WORKERS, flat.numel, generator=torch.Generator().manual_seed(0))
    given = flat.of_matrices.clone()
    # 16 x 4: four columns hold all of it; products of two rounds of 4 and 16 terms of size 1 to 4.
    torch.testing.assert_close(PowerSGD(4, flat).average(given.clone()), given.mean(0), rtol=0, atol=1e-4)
    low = PowerSGD(1, flat)
    result = low.average(given.clone())
    assert torch.linalg.matrix_rank(result[: flat.numel].view(16, 4), atol=1e-4) == 1
    assert torch.equal(low.residuals, given - result)


def test_the_best_rate_is_that_of_the_first_seed_and_a_loss_that_is_not_finite_never_is(tmp_path: Path) -> None:
    runs = simulated.Runs({"model": "tiny"}, 1, tmp_path / "simulated.jsonl")
    trained = [(Way(rate=1e-3), 2.0), (Way(rate=2e-3), float("nan")), (Way(rate=1e-3, seed=1), 2.2)]
    for way, final in [*trained, (Way("int2", rate=5e-4), 2.5)]:
        runs._add(way, {"final": final, "bits": 2.25})
    again = simulated.Runs({"model": "tiny"}, 1, tmp_path / "simulated.jsonl")
    ways = [Way(rate=1e-3), Way(rate=2e-3), Way("int2", rate=5e-4), Way("int2", rate=1e-3)]
    best = simulated.at_best(ways, again)
    assert best == [Way(rate=1e-3), Way("int2", rate=5e-4)]
    ends = simulated_report.Ends(best, again)
    assert ends.cell(Way()) == "2.100 ± 0.100"
    assert ends.beside(Way("int2"), Way()) == "+25.0% (+25.0% to +25.0%)"  # of the seed that both have
