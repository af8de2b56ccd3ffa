"""Error feedback: what was sent plus the residual is what was meant, at both quantizations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cases import mixed, same_bits
from narrowcast import codec as as_codec
from narrowcast.distributed.encoder import Encoder
from narrowcast.distributed.gradients import layout
from narrowcast.distributed.gradients.error_feedback.outcome import Outcome
from narrowcast.distributed.gradients.error_feedback.residuals import Holder, Residuals
from narrowcast.distributed.gradients.error_feedback.segment import FeedbackSegment
from narrowcast.distributed.gradients.layout import ChunkLayout, Gradient, lay_out
from narrowcast.distributed.gradients.stats import Probe
from narrowcast.distributed.stats import Meter
from narrowcast.distributed.transport.buffers import Buffers

CPU = torch.device("cpu")
NUMEL = 640
EXACT = ("int8", "int6", "int4", "int2", "nf4", "apot4", "int4:block=row", "int8:block=256", "fp8_e4m3", "bf16")
"""To nearest, and never further than from x to 2x or x/2: the difference is a number of fp32."""


def _encoder(spec: str) -> Encoder:
    return Encoder(as_codec(spec), 5, Meter("test", 0), Buffers(), CPU)


def _owned_by_zero(spec: str, sender: Tensor, owner: Tensor, probe: Probe | None = None) -> FeedbackSegment:
    """A segment of rank 0 of two; the residuals and the results are those given."""
    results = torch.empty(2, NUMEL)
    return FeedbackSegment(
        _encoder(spec), sender.unbind(), results.unbind(), 3, keeps=True, owner=owner, owner_next=owner, probe=probe
    )


def _go(segment: FeedbackSegment, sender: Tensor, gradient: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step of rank 0: (what it meant to send, what arrived at the owner, what the owner meant to send)."""
    encoder, size = segment.encoder, segment.sizes[0]
    sender += gradient
    meant = sender.clone()
    row, inbox, out = (torch.empty(n, size, dtype=torch.uint8) for n in (1, 2, 1))
    segment.encode(0, 1, row[0])
    segment.sent()
    arrived = encoder.codec.decode(row, NUMEL)[0]
    encoder.encode(other[None], inbox[1], 1, 0, 3)
    from_other = encoder.codec.decode(inbox[1:], NUMEL)[0]
    before = torch.zeros(NUMEL) if segment._owner is None else segment._owner.clone()
    segment.decode_sum_encode(inbox, 0, 2, out[0])
    owner_meant = (meant[0] + from_other) / 2 + before
    assert same_bits(segment.sums[0], encoder.codec.decode(out, NUMEL)[0]), "the owner decodes its own bytes"
    return meant, arrived, owner_meant


@pytest.mark.parametrize("spec", EXACT)
def test_sent_plus_residual_is_what_was_meant_exactly_where_rounding_is_to_nearest(spec: str) -> None:
    sender, owner = torch.zeros(2, NUMEL), torch.zeros(NUMEL)
    for step in range(10):
        segment = _owned_by_zero(spec, sender, owner)
        gradient = torch.randn(2, NUMEL, generator=torch.Generator().manual_seed(step))
        meant, arrived, owner_meant = _go(segment, sender, gradient, gradient[0].flip(0))
        assert torch.equal(arrived.double() + sender[1].double(), meant[1].double()), step
        assert torch.equal(segment.sums[0].double() + owner.double(), owner_meant.double()), step
        assert not sender[0].any(), "its own part is not quantized"
        assert sender[1].any()
        assert owner.any()


@pytest.mark.parametrize("spec", ["sign", "int4:stochastic=true", "levels:table=-1.0|1.0"])
def test_elsewhere_the_residual_is_the_nearest_number_to_the_difference(spec: str) -> None:
    sender, owner = torch.zeros(2, NUMEL), torch.zeros(NUMEL)
    for step in range(10):
        segment = _owned_by_zero(spec, sender, owner)
        gradient = torch.randn(2, NUMEL, generator=torch.Generator().manual_seed(step))
        meant, arrived, owner_meant = _go(segment, sender, gradient, gradient[0].flip(0))
        assert torch.equal(sender[1], (meant[1].double() - arrived.double()).float())
        assert torch.equal(owner, (owner_meant.double() - segment.sums[0].double()).float())


def test_with_no_residuals_and_no_probe_the_parts_stay_as_they_are() -> None:
    parts, results = mixed(2 * NUMEL).view(2, NUMEL), torch.empty(2, NUMEL)
    before = parts.clone()
    segment = FeedbackSegment(
        _encoder("int4"), parts.unbind(), results.unbind(), 3, keeps=False, owner=None, owner_next=None, probe=None
    )
    row, inbox = torch.zeros(segment.sizes[0], dtype=torch.uint8), torch.zeros(2, segment.sizes[0], dtype=torch.uint8)
    segment.encode(0, 1, row)
    segment.sent()
    segment.decode_sum_encode(inbox, 0, 2, row)
    assert same_bits(parts, before)


def test_a_probe_says_how_far_the_signal_is_above_the_noise_and_changes_nothing() -> None:
    gradient = torch.randn(2, NUMEL, generator=torch.Generator().manual_seed(1))
    found = []
    for probe in (None, Probe()):
        sender, owner = torch.zeros(2, NUMEL), torch.zeros(NUMEL)
        segment = _owned_by_zero("int4", sender, owner, probe)
        meant, arrived, owner_meant = _go(segment, sender, gradient, gradient[0].flip(0))
        found.append((sender, owner, *segment.sums[:1]))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
    assert probe is not None
    for name, signal, noise in (("sender", meant[1], meant[1] - arrived), ("owner", owner_meant, owner)):
        ratio = float(signal.double().square().sum() / noise.double().square().sum())
        # Norms are fp32 sums of 640 squares: off by a part in 1e5 at most, which is 1e-4 dB.
        assert probe.sqnr(name) == pytest.approx(10 * math.log10(ratio), abs=1e-3)
    assert math.isnan(Probe().sqnr("sender"))


@pytest.mark.parametrize("spec", [*EXACT, "sign", "levels:table=-1.0|1.0", "pot3", "fp8_e5m2"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_at_a_sender_is_not_finite_in_the_result_so_that_no_residual_of_it_counts(
    bad: float, spec: str
) -> None:
    sender, owner = torch.zeros(2, NUMEL), torch.zeros(NUMEL)
    gradient, other = torch.ones(2, NUMEL), torch.ones(NUMEL)
    other[5] = bad
    segment = _owned_by_zero(spec, sender, owner)
    _go(segment, sender, gradient, other)
    outcome = Outcome()
    outcome.note(segment.sums[0])
    outcome.complete = True
    assert not outcome.applies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_sum_that_overflows_is_not_taken_for_a_number_that_is_not_finite(dtype: torch.dtype) -> None:
    outcome = Outcome()
    outcome.note(torch.full((1000,), torch.finfo(dtype).max if dtype != torch.float64 else 3e38, dtype=dtype))
    outcome.note(torch.empty(0, dtype=dtype))
    outcome.complete = True
    assert outcome.applies
    outcome.note(torch.tensor([1.0, math.nan], dtype=dtype))
    assert not outcome.applies


# -- by parameter -----------------------------------------------------------------------------------------------------

SIZES = {"a": 1024, "b": 3000, "c": 1009}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections and chunks of few elements, so that small parameters have many."""
    monkeypatch.setattr(layout, "SECTION", 512)
    monkeypatch.setattr(layout, "CHUNK", 2048)
    monkeypatch.setattr(layout, "CHUNK_COLUMNS", 1)


def _buckets(*buckets: str) -> list[ChunkLayout]:
    """The chunks of buckets that hold these parameters."""
    chunks = []
    for names in buckets:
        offsets = [sum(SIZES[other] for other in names[:i]) for i in range(len(names))]
        chunks += lay_out([Gradient(n, o, SIZES[n], False) for n, o in zip(names, offsets, strict=True)], 3)
    return chunks


def _fill(residuals: Residuals, chunks: list[ChunkLayout], seed: int) -> None:
    """Give every element a value of its own, and padding zeros, as steps leave them."""
    for chunk in chunks:
        sender, owner = residuals.of(chunk, CPU)
        assert owner is not None
        for section, _, span in chunk.spans():
            count = section.owned(residuals.holder.row)
            generator = torch.Generator().manual_seed(hash((section.start, len(section.name), seed)) % 1000)
            owner[span][:count] = torch.randn(count, generator=generator)
            if sender is not None:
                for place in section.places(sender[:, span]):
                    place.copy_(torch.randn(place.shape, generator=generator))


def _same(
    one: dict[str, tuple[Tensor | None, Tensor | None]], other: dict[str, tuple[Tensor | None, Tensor | None]]
) -> bool:
    assert one.keys() == other.keys()
    return all(
        a is b is None or (a is not None and b is not None and same_bits(a, b))
        for name in one
        for a, b in zip(one[name], other[name], strict=True)
    )


@pytest.mark.parametrize("mode", [True, "owner"])
@pytest.mark.parametrize("rank", [0, 2])
def test_residuals_move_along_when_buckets_are_rebuilt(mode: bool, rank: int) -> None:
    residuals = Residuals(mode, Holder(3, rank))
    first, second = _buckets("abc"), _buckets("cb", "a")
    _fill(residuals, first, 1)
    before = residuals.by_name()
    assert {name: None if sender is None else len(sender) for name, (sender, _) in before.items()} == {
        name: numel if mode is True else None for name, numel in SIZES.items()
    }
    for chunks in (second, first, second):
        for chunk in chunks:
            residuals.of(chunk, CPU)
            assert _same(residuals.by_name(), before), "also half-way"
    _fill(residuals, second, 2)
    after = residuals.by_name()
    assert not _same(after, before)
    for chunk in first:
        residuals.of(chunk, CPU)
    assert _same(residuals.by_name(), after), "not what the first layout held once"


def test_residuals_are_held_once_after_a_rebuild() -> None:
    residuals = Residuals(True, Holder(3, 0))
    for chunks in (_buckets("abc"), _buckets("cb", "a"), _buckets("abc")):
        for chunk in chunks:
            residuals.of(chunk, CPU)
    sender, owner = residuals.tensors()
    columns_of = sum(chunk.columns for chunk in _buckets("abc"))
    assert sum(t.numel() for t in sender) == 3 * columns_of
    assert sum(t.numel() for t in owner) == columns_of
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*sender, *owner)}
    assert sum(memory.values()) == 4 * 4 * columns_of, "nothing of an earlier layout is kept alive"


@pytest.mark.parametrize("mode", [True, "owner"])
def test_loaded_residuals_go_to_their_places_one_piece_at_a_time(mode: bool) -> None:
    source = Residuals(mode, Holder(3, 1))
    _fill(source, _buckets("abc"), 1)
    saved = source.by_name()
    target = Residuals(mode, Holder(3, 1))
    _fill(target, _buckets("ab", "c"), 2)
    target.load({name: saved[name] for name in saved})
    assert _same(target.by_name(), saved)
    for chunk in _buckets("ab", "c"):
        target.of(chunk, CPU)
        assert _same(target.by_name(), saved), "also where some of a parameter is in place and some is not"
