"""Where gradients lie: each element in one place, and who owns it a matter of the parameter and the ranks alone."""

from __future__ import annotations

import pytest
import torch

from narrowcast.distributed.gradients import layout
from narrowcast.distributed.gradients.layout import ChunkLayout, Gradient, is_worth_rows, lay_out, sections_of

CASES = [(numel, ranks) for ranks in (2, 3, 4, 7) for numel in (ranks * 128, 1000, 1009, 4096, 5 * ranks * 128 - 127)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections and chunks of few elements, so that small parameters have many."""
    monkeypatch.setattr(layout, "SECTION", 512)
    monkeypatch.setattr(layout, "CHUNK", 2048)
    monkeypatch.setattr(layout, "CHUNK_COLUMNS", 1)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("numel", "ranks"), CASES)
def test_sections_hold_every_element_once_at_the_place_that_its_index_says(numel: int, ranks: int) -> None:
    found = sections_of("weight", numel, ranks)
    part = found[0].part
    assert part % 128 == 0
    assert part * ranks >= numel > (part - 128) * ranks
    whole = torch.full((ranks, part), -1)
    buffer = torch.arange(numel + 50) - 30  # the gradient lies somewhere in its bucket
    for section in found:
        matrix = torch.full((ranks, section.columns), -1)
        for place, elements in zip(section.places(matrix), section.elements(buffer[30 : 30 + numel]), strict=True):
            place.copy_(elements)
        for padding in section.padding(matrix):
            assert bool((padding == -1).all())
            padding.fill_(-2)
        assert not bool((matrix == -1).any()), "neither an element nor padding"
        assert [int((row >= 0).sum()) for row in matrix] == [section.owned(rank) for rank in range(ranks)]
        whole[:, section.start : section.start + section.columns] = matrix
    assert torch.equal(whole.view(-1)[:numel], torch.arange(numel))
    assert bool((whole.view(-1)[numel:] == -2).all())


def test_a_section_is_half_a_million_elements_at_most_and_starts_where_a_block_does() -> None:
    for numel, ranks in ((3_000_001, 2), (3_000_001, 3), (128 * 5000, 5000), (128 * 5000 * 3, 5000)):
        found = sections_of("weight", numel, ranks)
        assert all(section.columns * ranks <= max(1 << 19, 128 * ranks) for section in found)
        assert all(section.start % 128 == section.columns % 128 == 0 for section in found)


def _gradients(names: str) -> list[Gradient]:
    sizes = {"a": 1024, "b": 3000, "c": 1009, "d": 300, "e": 5000}
    found, offset = [], 0
    for name in names:
        found.append(Gradient(name, offset, sizes[name], name in "de"))
        offset += sizes[name]
    return found


def _placed(chunks: list[ChunkLayout]) -> tuple[set[object], int]:
    return {section for chunk in chunks for section, _ in chunk.sections}, sum(chunk.exempt_numel for chunk in chunks)


@pytest.mark.usefixtures("small")
def test_the_sections_of_a_parameter_do_not_depend_on_its_bucket() -> None:
    together = _placed(lay_out(_gradients("abcde"), 3))
    assert _placed(lay_out(_gradients("ecdba"), 3)) == together
    assert _placed(lay_out(_gradients("abcde"), 3, at_once=True)) == together
    apart = [_placed(lay_out(_gradients(names), 3)) for names in ("ad", "b", "ce")]
    assert set().union(*(found for found, _ in apart)) == together[0]
    assert sum(exempt for _, exempt in apart) == together[1] == 5300


@pytest.mark.usefixtures("small")
def test_chunks_cover_a_bucket_once_and_stay_small() -> None:
    for at_once in (False, True):
        chunks = lay_out(_gradients("abcde"), 3, at_once=at_once)
        assert len(chunks) == 1 if at_once else len(chunks) > 4
        seen = torch.zeros(1024 + 3000 + 1009 + 300 + 5000, dtype=torch.int64)
        for chunk in chunks:
            assert at_once or chunk.columns * 3 + chunk.exempt_numel <= 2048
            assert chunk.columns == sum(section.columns for section, _ in chunk.sections)
            for offset, numel in chunk.exempt:
                seen[offset : offset + numel] += 1
            for section, offset, span in chunk.spans():
                assert span.stop - span.start == section.columns
                for elements in section.elements(seen[offset : offset + section.numel]):
                    elements += 1
        assert bool((seen == 1).all())


def test_parameters_of_less_than_a_block_a_rank_get_no_rows() -> None:
    assert is_worth_rows(512, 4)
    assert not is_worth_rows(511, 4)
