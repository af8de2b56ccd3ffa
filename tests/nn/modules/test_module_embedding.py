"""nc.nn.Embedding: a lookup decodes the rows it needs and no others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import narrowcast as nc
from cases import same_bits
from narrowcast import Codec
from narrowcast.errors import DtypeError

pytestmark = pytest.mark.ambient
INFERENCE = pytest.mark.not_in("inference mode", reason="what is made there can be neither trained nor changed outside")


def made(codec: str | Codec = "int8", **options: object) -> nc.nn.Embedding:
    torch.manual_seed(0)
    return nc.nn.Embedding.from_float(nn.Embedding(11, 70, **options), codec)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,), (2, 0)])
def test_every_codec_looks_up_the_decoded_weight_bit_for_bit(codec: Codec, shape: tuple[int, ...], device: str) -> None:
    embedding = made(codec).to(device)
    indices = torch.randint(0, 11, shape, device=device)
    assert same_bits(embedding(indices), embedding.decoded()[indices])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_result_has_the_dtype_of_the_module(dtype: torch.dtype) -> None:
    embedding = made("int4").to(dtype)
    found = embedding(torch.tensor([3, 3, 0], dtype=torch.int32))
    assert found.dtype == embedding.dtype == dtype
    assert same_bits(found, embedding.decoded()[[3, 3, 0]])


@INFERENCE
def test_rows_that_are_not_looked_up_are_not_decoded() -> None:
    embedding = made("int8:block=row")
    with torch.no_grad():
        embedding.weight[5] = 255  # scale bytes of all ones: a NaN, were it read
    assert embedding.decoded()[5].isnan().any()
    assert embedding(torch.tensor([4, 6])).isfinite().all()


def test_padding_idx_is_kept_and_its_row_is_zero() -> None:
    embedding = made("int8", padding_idx=2)
    assert embedding.padding_idx == 2
    assert not embedding(torch.tensor([2])).any()
    assert repr(embedding) == "Embedding(11, 70, padding_idx=2, codec='int8')"
    assert embedding.dequantize().padding_idx == 2


def test_max_norm_is_skipped_with_the_reason() -> None:
    model = nn.Sequential(nn.Embedding(11, 70, max_norm=1.0))
    report = nc.quantize_(model)
    assert report.entries == []
    assert report.skips == [
        ("0.weight", "max_norm changes rows as they are read, and encoded rows are not changed"),
    ]
    assert type(model[0]) is nn.Embedding


@pytest.mark.not_in(reason="a compiler sees what surrounds it: tests/test_compile.py")
def test_it_compiles_into_one_graph() -> None:
    embedding, indices = made("nf4"), torch.tensor([[1, 2], [10, 1]])
    compiled = torch.compile(embedding, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(indices), embedding(indices))
    torch._dynamo.reset()


def test_copies_and_dequantize() -> None:
    embedding, indices = made("nf4"), torch.tensor([0, 7])
    assert same_bits(copy.deepcopy(embedding)(indices), embedding(indices))
    again = embedding.dequantize()
    assert type(again) is nn.Embedding
    assert same_bits(again(indices).detach(), embedding(indices))


def test_indices_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DtypeError, match=r"input: an embedding takes indices in int32 or int64, got float32.*long"):
        made()(torch.zeros(2))
    with pytest.raises(IndexError):
        made()(torch.tensor([11]))
