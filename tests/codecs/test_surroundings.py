"""What surrounds the making of a codec, and its first call, does not change a byte: all codecs, in all surroundings."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from ambient import surrounded
from cases import CODECS, OF_EACH_FAMILY, mixed, same_bits
from narrowcast.codecs import registry
from narrowcast.kernels import reference
from narrowcast.kernels.layout import Recipe
from narrowcast.nn.qat.grids import codec_grid, has_unsigned
from narrowcast.nn.qat.observers import OBSERVERS

SEED = 3
TRAINED = ["int8", "int4", "sign", "nf4", "apot4", "pot4", "fp8_e4m3", "fp8_e5m2"]


def decibels(x: Tensor, y: Tensor) -> float:
    return float(10 * (x.double().square().sum() / (x - y).double().square().sum()).log10())


def plainly(make):  # type: ignore[no-untyped-def]
    """What `make` returns in plain surroundings."""
    with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            return make()
        finally:
            torch.set_default_dtype(before)


def test_every_codec_made_anew_writes_and_reads_the_same_bytes(ambient: str) -> None:
    x = plainly(lambda: mixed(300))
    for name, codec in CODECS.items():
        row, bound = plainly(lambda codec=codec: (codec.encode(x, SEED), codec.max_error(x)))
        anew = nc.codec(codec.config())
        assert anew is not codec
        assert torch.equal(anew.encode(x, SEED), row), name
        assert same_bits(anew.decode(row, 300), codec.decode(row, 300)), name
        assert same_bits(anew.max_error(x), bound), name


@pytest.mark.parametrize("state", ["default dtype bf16", "default dtype fp64"])
def test_a_codec_first_used_in_another_default_dtype_is_as_good_afterwards(state: str) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    good = {name: decibels(x, nc.decode(nc.encode(x, name))) for name in ("nf4", "apot4", "pot4")}
    assert all(found > 14 for found in good.values())
    registry._remembered.cache_clear()
    with surrounded(state):
        inside = {name: decibels(x, nc.decode(nc.encode(x, name))) for name in good}
    after = {name: decibels(x, nc.decode(nc.encode(x, name))) for name in good}
    assert inside == after == good


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_table_first_used_in_inference_mode_serves_training_afterwards(device: str) -> None:
    rows = torch.zeros(4, nc.codec("nf4").row_bytes(64), dtype=torch.uint8, device=device)
    registry._remembered.cache_clear()
    with torch.inference_mode():
        nc.codec("nf4").linear(torch.ones(2, 64, device=device), rows)
    x = torch.ones(2, 64, device=device, requires_grad=True)
    nc.codec("nf4").linear(x, rows).sum().backward()
    assert x.grad is not None


def test_a_fresh_seed_is_drawn_in_any_surroundings(ambient: str) -> None:
    x = plainly(lambda: mixed(300))
    assert nc.encode(x, "int4:stochastic=true").nbytes == nc.codec("int4").row_bytes(300)


def test_the_levels_of_additive_powers_of_two_are_fp64_on_the_cpu(ambient: str) -> None:
    levels = nc.codecs.apot_levels(4)
    assert (levels.dtype, levels.device.type) == (torch.float64, "cpu")


def test_grids_of_training_are_the_same(ambient: str) -> None:
    for spec in TRAINED:
        for signed in (True, False) if has_unsigned(nc.codec(spec)) else (True,):
            expected = plainly(lambda spec=spec, signed=signed: codec_grid(spec, signed))
            found = codec_grid(spec, signed)
            for one, other in zip(found.kernel[:2], expected.kernel[:2], strict=True):
                assert same_bits(one, other)
            assert torch.equal(found.codes, expected.codes)


@pytest.mark.parametrize("spec", TRAINED)
def test_fake_quantization_gives_the_same_numbers(spec: str, ambient: str) -> None:
    x = plainly(lambda: torch.randn(16, 64, generator=torch.Generator().manual_seed(0)))

    def quantized() -> Tensor:
        found: Tensor = nc.nn.FakeQuantize(spec, channel_axis=0, device="cpu")(x).detach()
        return found

    expected = plainly(quantized)
    assert decibels(x, expected) > 4
    assert same_bits(quantized(), expected)


@pytest.mark.parametrize("kind", OBSERVERS)
def test_observers_count_in_fp32(kind: str, ambient: str) -> None:
    rows = plainly(lambda: torch.randn(3, 500, generator=torch.Generator().manual_seed(0)))

    def clip() -> Tensor:
        observer = OBSERVERS[kind]()
        observer.observe(rows)
        observer.observe(rows * 3)
        return observer.clip(codec_grid("int4"))

    expected = plainly(clip)
    assert same_bits(clip(), expected)


def test_a_bf16_model_made_the_usual_way_keeps_its_weights_in_nf4() -> None:
    registry._remembered.cache_clear()
    with surrounded("default dtype bf16"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64))
        before = model[0].weight.detach().clone()
        nc.quantize_(model, "nf4")
        after = model[0].decoded()
    assert after.dtype == torch.bfloat16
    assert decibels(before.float(), after.float()) > 15


def test_rows_are_decoded_to_what_was_asked_for(ambient: str) -> None:
    x = plainly(lambda: mixed(64))
    codec = nc.codec("int8")
    row = codec.encode(x)
    assert (row.dtype, row.device.type) == (torch.uint8, "cpu")
    assert codec.decode(row, 64).dtype == torch.float32
    assert codec.decode_sum(row[None], 64).dtype == torch.float32
    assert nc.decode(nc.encode(x, codec)).dtype == torch.float32
    assert math.isfinite(float(codec.max_error(x).max()))


def test_the_reference_means_the_same(ambient: str) -> None:
    x = plainly(lambda: mixed(3 * 150).view(3, 150))
    for name in OF_EACH_FAMILY:
        recipe = nc.codec(name).recipe(torch.device("cpu"))

        def results(recipe: Recipe = recipe) -> list[Tensor]:
            rows = reference.encode(x, recipe, SEED)
            return [
                rows,
                reference.decode(rows, 150, torch.bfloat16, recipe),
                reference.decode_sum(rows, 150, torch.float32, recipe, x[1], 1, 3),
                reference.decode_sum_encode(rows, 150, recipe, None, -1, 1, SEED),
                reference.linear(x, rows, recipe, x[0, :3]),
            ]

        for one, other in zip(results(), plainly(results), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), name


@pytest.mark.parametrize("batch", [2, 100])
def test_rows_are_multiplied_and_differentiated_the_same(batch: int, ambient: str) -> None:
    """100 vectors are more than the native core multiplies with: W is decoded tile by tile."""
    if ambient in ("inference mode", "no grad"):
        pytest.skip("nothing is differentiated there")
    codec = nc.codec("int4")

    def results() -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        weight, x, bias, grad = (
            torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")
            for size in ((40, 64), (batch, 64), (40,), (batch, 40))
        )
        x.requires_grad_()
        y = codec.linear(x, codec.encode(weight), bias)
        return [y.detach(), *torch.autograd.grad(y, x, grad)]

    for one, other in zip(results(), plainly(results), strict=True):
        assert same_bits(one, other)
