"""Where gradients lie: each element in one place, and who owns it a matter of the parameter and the ranks alone."""

from __future__ import annotations

import pytest
import torch

from narrowcast.distributed.gradients import columns
from narrowcast.distributed.gradients.columns import Entry, PieceLayout, chunks, lay_out, worth_rows

CASES = [(numel, ranks) for ranks in (2, 3, 4, 7) for numel in (ranks * 128, 1000, 1009, 4096, 5 * ranks * 128 - 127)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and pieces of few elements, so that small parameters have many."""
    monkeypatch.setattr(columns, "CHUNK", 512)
    monkeypatch.setattr(columns, "PIECE", 2048)
    monkeypatch.setattr(columns, "PIECE_COLUMNS", 1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("numel", "ranks"), CASES)
def test_chunks_hold_every_element_once_at_the_place_that_its_index_says(numel: int, ranks: int) -> None:
    found = chunks("weight", numel, ranks)
    part = found[0].part
    assert part % 128 == 0
    assert part * ranks >= numel > (part - 128) * ranks
    whole = torch.full((ranks, part), -1)
    buffer = torch.arange(numel + 50) - 30  # the gradient lies somewhere in its bucket
    for chunk in found:
        matrix = torch.full((ranks, chunk.columns), -1)
        for place, elements in zip(chunk.places(matrix), chunk.elements(buffer[30 : 30 + numel]), strict=True):
            place.copy_(elements)
        for padding in chunk.padding(matrix):
            assert bool((padding == -1).all())
            padding.fill_(-2)
        assert not bool((matrix == -1).any()), "neither an element nor padding"
        assert [int((row >= 0).sum()) for row in matrix] == [chunk.owned(rank) for rank in range(ranks)]
        whole[:, chunk.start : chunk.start + chunk.columns] = matrix
    assert torch.equal(whole.view(-1)[:numel], torch.arange(numel))
    assert bool((whole.view(-1)[numel:] == -2).all())


def test_a_chunk_is_half_a_million_elements_at_most_and_starts_where_a_block_does() -> None:
    for numel, ranks in ((3_000_001, 2), (3_000_001, 3), (128 * 5000, 5000), (128 * 5000 * 3, 5000)):
        found = chunks("weight", numel, ranks)
        assert all(chunk.columns * ranks <= max(1 << 19, 128 * ranks) for chunk in found)
        assert all(chunk.start % 128 == chunk.columns % 128 == 0 for chunk in found)


def _entries(names: str) -> list[Entry]:
    sizes = {"a": 1024, "b": 3000, "c": 1009, "d": 300, "e": 5000}
    found, offset = [], 0
    for name in names:
        found.append(Entry(name, offset, sizes[name], name in "de"))
        offset += sizes[name]
    return found


def _placed(pieces: list[PieceLayout]) -> tuple[set[object], int]:
    return {chunk for piece in pieces for chunk, _ in piece.chunks}, sum(piece.exempt_numel for piece in pieces)


@pytest.mark.usefixtures("small")
def test_the_chunks_of_a_parameter_do_not_depend_on_its_bucket() -> None:
    together = _placed(lay_out(_entries("abcde"), 3))
    assert _placed(lay_out(_entries("ecdba"), 3)) == together
    assert _placed(lay_out(_entries("abcde"), 3, at_once=True)) == together
    apart = [_placed(lay_out(_entries(names), 3)) for names in ("ad", "b", "ce")]
    assert set().union(*(found for found, _ in apart)) == together[0]
    assert sum(exempt for _, exempt in apart) == together[1] == 5300


@pytest.mark.usefixtures("small")
def test_pieces_cover_a_bucket_once_and_stay_small() -> None:
    for at_once in (False, True):
        pieces = lay_out(_entries("abcde"), 3, at_once)
        assert len(pieces) == 1 if at_once else len(pieces) > 4
        seen = torch.zeros(1024 + 3000 + 1009 + 300 + 5000, dtype=torch.int64)
        for piece in pieces:
            assert at_once or piece.columns * 3 + piece.exempt_numel <= 2048
            assert piece.columns == sum(chunk.columns for chunk, _ in piece.chunks)
            for offset, numel in piece.exempt:
                seen[offset : offset + numel] += 1
            for chunk, offset, span in piece.spans():
                assert span.stop - span.start == chunk.columns
                for elements in chunk.elements(seen[offset : offset + chunk.numel]):
                    elements += 1
        assert bool((seen == 1).all())


def test_parameters_of_less_than_a_block_a_rank_get_no_rows() -> None:
    assert worth_rows(512, 4)
    assert not worth_rows(511, 4)
