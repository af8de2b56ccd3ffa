"""What a step travels in, and what is counted of it: warm-up, schedule, exemptions, bytes, residuals, memory."""

from __future__ import annotations

import gc
import math
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import trained
from ranks import play, run
from torch.nn.parallel import DistributedDataParallel as DDP
from trained import FEW, SHAPES, Expected, Given, Named, given

import narrowcast as nc
from cases import same_bits
from narrowcast.distributed.gradients.stats import BucketStats, GradientStats
from narrowcast.distributed.transport.agreement import HEADER_BYTES

pytestmark = pytest.mark.timeout(180)

WORLD = 3


def _train(rank: int, steps: int, cap: float = 25.0, **options: Any) -> tuple[list[Named], Any]:
    ddp = DDP(Given(SHAPES), bucket_cap_mb=cap)
    state = nc.compress_gradients(ddp, seed=1, **options)
    return [trained.backward(ddp, given(SHAPES, rank, step)) for step in range(steps)], state


def _of_all(step: int) -> list[Named]:
    return [given(SHAPES, rank, step) for rank in range(WORLD)]


def _averages(step: int) -> Named:
    of_all = _of_all(step)
    return {name: trained.average([gradients[name] for gradients in of_all]) for name in SHAPES}


def _equal(one: Named, other: Named) -> bool:
    return one.keys() == other.keys() and all(same_bits(one[name], other[name]) for name in other)


# -- scenes -----------------------------------------------------------------------------------------------------------


def warm_up(rank: int) -> Any:
    found, state = _train(rank, 4, codec="int4", warmup_steps=2)
    return found, state.stats(), str(state)


def schedule(rank: int) -> Any:
    """Uncompressed, int8, int2, uncompressed, int4."""
    found, state = _train(
        rank, 5, codec="int8", schedule=lambda step: (None, "int8", "int2", None, nc.codec("int4"))[step]
    )
    return found, state.stats(), state.error_feedback, str(state)


def small_buckets(rank: int) -> Any:
    found, state = _train(rank, 3, FEW, codec="int4")
    return found, state.stats()


def none_at_all(rank: int) -> Any:
    found, state = _train(rank, 2, codec=None)
    return found, state.stats(), str(state)


def all_exempt(rank: int) -> Any:
    found, state = _train(rank, 2, codec="int4", exempt=".")
    return found, state.stats()


def by_name(rank: int) -> Any:
    """By regex, by several, by a function, and none."""
    rules: list[Any] = ["^odd$", ["even", "^pri"], lambda name, p: p.shape[-1] == 1, None]
    found = []
    for rule in rules:
        _, state = _train(rank, 1, codec="int4", exempt=rule)
        found.append((state.stats().buckets[0].exempt, sorted(state.state_dict()["sender"])))
    return found


def bytes_of(rank: int) -> Any:
    found = {}
    for codec in ("int8", "int4", "sign", "nf4:block=row"):
        _, state = _train(rank, 2, codec=codec, error_feedback=True)
        found[codec] = state.stats()
    return found


class Writer:
    """What a TensorBoard SummaryWriter is to `log`."""

    def __init__(self) -> None:
        self.said: dict[str, tuple[float, int]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert isinstance(value, float)
        self.said[tag] = value, step


def logged(rank: int) -> Any:
    _, state = _train(rank, 3, FEW, codec="int4", warmup_steps=1)
    first, second = Writer(), Writer()
    state.log(first)
    state.log(second, step=70, prefix="mine/")
    return first.said, second.said, state.stats()


def signal(rank: int) -> Any:
    _, state = _train(rank, 1, codec="int4")
    stats, kept = state.stats(), state.state_dict()
    return stats, kept["sender"], kept["owner"]


def memory(rank: int) -> Any:
    """Tensors' bytes, threads, and what stats say of residuals, after ten steps and after fifty more."""
    ddp = DDP(Given(SHAPES), bucket_cap_mb=FEW)
    state = nc.compress_gradients(ddp, "int4")
    gradients = given(SHAPES, rank, 0)

    def steps(count: int) -> tuple[int, int]:
        for _ in range(count):
            ddp.zero_grad()
            ddp(gradients).backward()
        gc.collect()
        alive = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors()}
        return sum(alive.values()), threading.active_count()

    before, after = steps(10), steps(50)
    held = state.residuals.tensors()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*held[0], *held[1])}
    return before, after, state.stats().residual_bytes, sum(storages.values())


def _tensors() -> list[torch.Tensor]:
    return [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]


SCENES = {
    scene.__name__: scene
    for scene in (warm_up, schedule, small_buckets, none_at_all, all_exempt, by_name, bytes_of, logged, signal, memory)
}


@pytest.fixture(scope="module")
def played() -> list[dict[str, Any]]:
    return run(WORLD, play, SCENES, timeout=150)


# -- what travels how -------------------------------------------------------------------------------------------------


def test_warm_up_steps_are_exact_averages_and_leave_no_residuals(played: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec("int4"), WORLD, True)
    right = [_averages(0), _averages(1), expected.step(_of_all(2)), expected.step(_of_all(3))]
    for of_rank in played:
        found, stats, _ = of_rank["warm_up"]
        assert all(_equal(one, other) for one, other in zip(found, right, strict=True))
        assert stats.uncompressed == {"warm-up": 2}
        assert stats.steps == 4


def test_a_schedule_says_the_codec_of_each_step_and_residuals_outlast_a_change(played: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec("int8"), WORLD, True)
    right = [
        _averages(0),
        expected.step(_of_all(1), nc.codec("int8")),
        expected.step(_of_all(2), nc.codec("int2")),
        _averages(3),
        expected.step(_of_all(4), nc.codec("int4")),
    ]
    for of_rank in played:
        found, stats, feedback, _ = of_rank["schedule"]
        assert feedback is True
        assert all(_equal(one, other) for one, other in zip(found, right, strict=True))
        assert stats.uncompressed == {"schedule": 2}
        assert stats.buckets[0].codec == "int4"


def test_buckets_with_nothing_to_compress_are_counted_with_the_reason(played: list[dict[str, Any]]) -> None:
    for of_rank in played:
        _, stats = of_rank["small_buckets"]
        exempt = [bucket for bucket in stats.buckets.values() if bucket.codec is None]
        assert len(stats.buckets) == 4
        assert [(bucket.reason, bucket.exempt == bucket.numel) for bucket in exempt] == [("nothing to compress", True)]
        assert stats.uncompressed == {"nothing to compress": 2}, "from the second step on: first there was one bucket"
        found, stats = of_rank["all_exempt"]
        assert all(_equal(one, _averages(step)) for step, one in enumerate(found))
        assert stats.uncompressed == {"nothing to compress": 2}
        found, stats, _ = of_rank["none_at_all"]
        for step, one in enumerate(found):
            for name, right in _averages(step).items():
                # torch divides first and adds in its own order: three roundings of at most the largest addend.
                largest = torch.stack([g[name].abs() for g in _of_all(step)]).amax(0)
                assert bool(((one[name] - right).abs() <= 4 * 2.0**-23 * largest).all())
        assert stats.uncompressed == {"codec=None": 2}
        assert stats.scalars()["uncompressed/codec None"] == 2.0  # MLflow takes no "=" in a name
        assert stats.ratio == 1.0


def test_exempt_takes_a_regex_several_or_a_function(played: list[dict[str, Any]]) -> None:
    numels = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    small = {"bias", "tiny"}  # less than 128 elements a rank
    for of_rank in played:
        for (count, kept), exempt in zip(
            of_rank["by_name"], [{"odd"}, {"even", "prime"}, {"prime"}, set()], strict=True
        ):
            assert count == sum(numels[name] for name in exempt | small)
            assert kept == sorted(numels.keys() - exempt - small)


# -- what is counted --------------------------------------------------------------------------------------------------


def _row_bytes(codec: nc.Codec, rank: int) -> tuple[int, int]:
    """What a step's rows take: those that others own, and this rank's own sums."""
    compressed = {n: torch.Size(s).numel() for n, s in SHAPES.items() if not trained.exempt(s, WORLD)}
    parts = [-(-numel // (WORLD * 128)) * 128 for numel in compressed.values()]
    each = codec.row_bytes(sum(parts)) if codec.block != "row" else sum(map(codec.row_bytes, parts))
    exempt = sum(torch.Size(s).numel() for s in SHAPES.values()) - sum(compressed.values())
    part = -(-exempt // (WORLD * 128)) * 128
    lossless = [4 * max(0, min(part, exempt - r * part)) for r in range(WORLD)]
    lossless = [-(-nbytes // 16) * 16 for nbytes in lossless]
    there = sum(each + lossless[peer] for peer in range(WORLD) if peer != rank)
    return there, each + lossless[rank]


def test_bytes_are_those_of_the_rows_and_headers(played: list[dict[str, Any]]) -> None:
    numel = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    for rank, of_rank in enumerate(played):
        for name, stats in of_rank["bytes_of"].items():
            there, back = _row_bytes(nc.codec(name), rank)
            step = there + (WORLD - 1) * (back + HEADER_BYTES)
            assert stats.sent_bytes == 2 * step, name
            assert stats.plain_bytes == 2 * (2 * 4 * numel * (WORLD - 1) // WORLD)
            assert stats.saved_bytes == stats.plain_bytes - stats.sent_bytes
            assert stats.ratio == stats.plain_bytes / stats.sent_bytes


def test_signal_noise_and_residuals_are_those_of_the_model(played: list[dict[str, Any]]) -> None:
    expected = Expected(nc.codec("int4"), WORLD, True)
    expected.step(_of_all(0))
    for rank, of_rank in enumerate(played):
        stats, sender, owner = of_rank["signal"]
        others = [r for r in range(WORLD) if r != rank]
        meant = torch.cat([m[rank, others].reshape(-1) for m in expected.meant.values()]).double()
        lost = torch.cat([r.view(-1) for r in sender.values()]).double()
        own_meant = torch.cat([m[rank] for m in expected.owner_meant.values()]).double()
        own_lost = torch.cat([r.view(-1) for r in owner.values()]).double()
        bucket = stats.buckets[0]
        # Norms are taken in fp32 over some thousand elements: off by 1e-4 dB at the most.
        assert bucket.reason == ""  # it went compressed
        assert bucket.sqnr == pytest.approx(20 * math.log10(meant.norm() / lost.norm()), abs=1e-3)
        assert bucket.owner_sqnr == pytest.approx(20 * math.log10(own_meant.norm() / own_lost.norm()), abs=1e-3)
        assert stats.residual_norm == pytest.approx(float(lost.norm()), rel=1e-5)
        assert stats.owner_residual_norm == pytest.approx(float(own_lost.norm()), rel=1e-5)


def test_seconds_add_up(played: list[dict[str, Any]]) -> None:
    for of_rank in played:
        for stats in of_rank["bytes_of"].values():
            assert 0 < stats.exposed_seconds <= stats.busy_seconds
            assert stats.hidden_seconds == stats.busy_seconds - stats.exposed_seconds


def _bucket(index: int, sqnr: float) -> BucketStats:
    return BucketStats(index, 1000, 0, "int4", sqnr=sqnr)


STATS = GradientStats(10, 2_600_000, 366_000, 0.12, 0.074, {0: _bucket(0, 20.14)})


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({}, "10 steps, 366 kB sent in place of 2.6 MB (7.1x fewer), 0.07 s not hidden, SQNR 20.1 dB"),
        (
            {"buckets": {i: _bucket(i, sqnr) for i, sqnr in enumerate((23.0, 19.86, math.nan, math.inf))}},
            "10 steps, 366 kB sent in place of 2.6 MB (7.1x fewer), 0.07 s not hidden, SQNR 19.9 to 23.0 dB",
        ),
        (
            {"buckets": {}, "uncompressed": {"warm-up": 2, "nothing to compress": 1}},
            "10 steps, 366 kB sent in place of 2.6 MB (7.1x fewer), 0.07 s not hidden; "
            "uncompressed: 2 (warm-up), 1 (nothing to compress)",
        ),
        (
            {"gather_plain_bytes": 7_000_000_000, "gather_sent_bytes": 1_750_400_000},
            "10 steps, 366 kB sent in place of 2.6 MB (7.1x fewer), parameters 1.75 GB in place of 7 GB, "
            "0.07 s not hidden, SQNR 20.1 dB",
        ),
        (
            {"steps": 1, "plain_bytes": 600, "sent_bytes": 999_600, "exposed_seconds": 71.0, "buckets": {}},
            "1 step, 1 MB sent in place of 600 B, 71.00 s not hidden",  # headers
        ),
    ],
)
def test_stats_print_as_one_line(changed: dict[str, Any], line: str) -> None:
    assert str(replace(STATS, **changed)) == line
    assert f"{replace(STATS, **changed)!r}".startswith("GradientStats(steps=")


def test_where_nothing_travels_the_line_says_so() -> None:
    assert str(GradientStats(steps=3)) == "3 steps, nothing sent"


@pytest.mark.parametrize(
    ("options", "head"),
    [
        ({"codec": "int4"}, "int4, error feedback"),
        ({"codec": "int8:block=32"}, "int8:block=32"),
        ({"codec": "int8", "error_feedback": "owner"}, "int8, error feedback at the owner"),
        ({"codec": "auto"}, "auto, not chosen yet"),
        ({"codec": None}, "no codec"),
        ({"schedule": lambda step: None}, "schedule, error feedback"),
    ],
)
def test_a_compression_prints_what_it_is_and_what_it_has_cost(options: dict[str, Any], head: str) -> None:
    state = nc.GradientCompression(**options)
    assert str(state) == f"{head}: 0 steps, nothing sent"
    state.step = 3
    assert str(state) == f"{head}: 3 steps, nothing sent"


@pytest.mark.parametrize(("codec", "head"), [("int4", "auto: int4, error feedback"), (None, "auto: no codec")])
def test_what_auto_has_chosen_is_printed(codec: str | None, head: str) -> None:
    state = nc.GradientCompression("auto")
    state.load_state_dict({**nc.GradientCompression(codec).state_dict(), "step": 2})
    assert str(state) == f"{head}: 0 steps, nothing sent"


def test_after_a_resume_steps_and_bytes_are_counted_since_then() -> None:
    state = nc.GradientCompression("int8")
    state.count_idle(0, 100, 800)
    state.step, state.clock.busy = 3, 1.0
    assert (state.stats().steps, state.stats().sent_bytes, state.stats().busy_seconds) == (3, 800, 1.0)
    state.load_state_dict({**state.state_dict(), "step": 40})
    assert (state.stats().steps, state.stats().sent_bytes, state.stats().busy_seconds) == (0, 0, 0.0)
    state.count_idle(0, 100, 800)
    state.step += 1
    assert (state.step, state.stats().steps, state.stats().sent_bytes) == (41, 1, 800)


def test_what_is_printed_is_what_was_counted(played: list[dict[str, Any]]) -> None:
    for of_rank in played:
        *_, stats, said = of_rank["warm_up"]
        assert said == f"int4, error feedback: {stats}"
        assert re.fullmatch(
            r"int4, error feedback: 4 steps, \d.* sent in place of \d.* \(\d\.\dx fewer\), \d+\.\d\d s not hidden, "
            r"SQNR 2\d\.\d dB; uncompressed: 2 \(warm-up\)",
            said,
        )
        *_, stats, said = of_rank["none_at_all"]
        assert said == f"no codec: {stats}"
        assert re.fullmatch(r"no codec: 2 steps, (.*) sent in place of \1; uncompressed: 2 \(codec=None\)", said)
        _, stats, _, said = of_rank["schedule"]
        assert said == f"schedule, error feedback: {stats}"


def test_log_writes_every_number_to_a_summary_writer(played: list[dict[str, Any]]) -> None:
    for of_rank in played:
        first, second, stats = of_rank["logged"]
        assert {step for _, step in first.values()} == {3}
        assert {step for _, step in second.values()} == {70}
        assert {re.sub("^mine/", "gradients/", tag) for tag in second} == set(first)
        assert first["gradients/saved_bytes"][0] == stats.saved_bytes
        assert first["gradients/ratio"][0] == stats.ratio
        assert first["gradients/residual_norm"][0] == stats.residual_norm > 0
        assert first["gradients/uncompressed/warm-up"][0] == 1.0
        compressed = [index for index, bucket in stats.buckets.items() if bucket.codec]
        assert len(compressed) == 3
        for index in compressed:
            assert first[f"gradients/sqnr/bucket {index}"][0] == stats.buckets[index].sqnr > 10
        assert all(math.isfinite(value) for value, _ in first.values())


def test_memory_is_used_again_and_residuals_are_all_that_is_added(played: list[dict[str, Any]]) -> None:
    for of_rank in played:
        (before, _), (after, threads), said, held = of_rank["memory"]
        assert after == before
        assert threads <= 4, "this one, and the lane's and two of the wire, which leave when they are idle"
        # Compressed parameters, padded to whole rows: for every rank's row once, and once for this rank's sums.
        parts = [
            -(-torch.Size(s).numel() // (WORLD * 128)) * 128 for s in SHAPES.values() if not trained.exempt(s, WORLD)
        ]
        assert held == 4 * (WORLD + 1) * sum(parts)
        assert said == 2 * held, "and as much for what the next step leaves"


def test_tensorboard_itself_can_be_logged_to(tmp_path: Any) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        nc.GradientCompression("int4").log(writer)
    assert list(tmp_path.iterdir())
