"""Tensors a tile at a time: the bytes and the numbers of the whole."""

from __future__ import annotations

import pytest
import torch

from narrowcast import Codec
from narrowcast.codecs import tiles as tiling
from narrowcast.codecs.streaming import decode_tiles, encode_tiles

SHAPES = [(1, 5003), (3, 2000), (7, 333), (1, 1000), (2, 1008), (1, 0), (0, 5), (5, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_have_the_bytes_of_the_whole_and_decode_to_its_numbers(
    codec: Codec, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiling, "TILE", 1000)
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole, numel = codec.encode(rows, 7), shape[1]
    reads: list[int] = []

    def read(start: int, stop: int) -> torch.Tensor:
        reads.append(stop - start)
        return rows.view(-1)[start:stop]

    tiles = [*encode_tiles(codec, *shape, read, 7)]
    assert torch.equal(torch.cat([torch.empty(0, dtype=torch.uint8), *tiles]), whole.view(-1))
    if not codec.stochastic and codec.block != "row":
        assert max(reads, default=0) <= 1000
    back = [*decode_tiles(codec, *shape, lambda start, stop: whole.view(-1)[start:stop], torch.float32)]
    joined = torch.cat([torch.empty(0), *(tile.view(-1) for tile in back)])
    assert torch.equal(joined, codec.decode(whole, numel).view(-1))
