"""The compiled core: the reference's bytes on every instruction set, within its memory, from any thread."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from narrowcast.errors import KernelWarning
from narrowcast.kernels import operators, reference
from narrowcast.kernels.cpu import binding
from processes import calls_that_survived, holds_in_a_fork

FLT_MAX = torch.finfo(torch.float32).max
BITS_OF = {
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float64: torch.int64,
}

WIDTHS = (2, 3, 4, 5, 6, 8)
FOR_EACH_WIDTH = (
    *("zero_point=true", "stochastic=true", "zero_point=true,stochastic=true"),
    *("scale=e8m0", "scale=fp16", "block=row"),
)
OPTIONS = [
    *(f"int{bits}:{option}" for bits in WIDTHS for option in FOR_EACH_WIDTH),
    *("int8:block=8", "int4:block=24", "int3:block=200", "int5:block=4096", "int4:scale=fp32,block=32"),
    *("int4:scale=e8m0,zero_point=true", "int6:scale=fp16,zero_point=true", "fp8_e4m3:block=128"),
    *("fp8_e5m2:block=row,scale=bf16", "fp8_e5m2:block=32,scale=e8m0", "sign:block=row", "sign:block=200"),
    *("sign:block=8,scale=e8m0", "sign:scale=fp16", "nf4:block=row", "nf4:scale=e8m0"),
    *("apot4:k=1", "apot8:k=7", "apot6:k=5", "levels:table=-1|0|0.5", "levels:table=0|0.1|0.5|0.7|0.9"),
    "levels:table=" + "|".join(f"{i * i / 100 - 30}" for i in range(200)),
]
SPECS = [*nc.list_codecs(), *OPTIONS]

INPUTS = ("normal", "wide", "denormal", "huge", "non-finite", "ties and zeros", "constant")


def made(kind: str, rows: int, numel: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, numel, generator=random)
    chance = torch.rand(rows, numel, generator=random)
    if kind == "wide":
        return x * torch.exp(20 * torch.randn(rows, numel, generator=random))
    if kind == "denormal":
        return x * 1e-40
    if kind == "huge":
        return torch.where(chance < 0.01, FLT_MAX * x.sign(), x * 1e38)
    if kind == "non-finite":
        x[chance < 0.01] = float("nan")
        x[chance > 0.99] = float("inf")
        x[(chance > 0.5) & (chance < 0.51)] = -float("inf")
    if kind == "ties and zeros":
        x = (x * 4).round() / 4
        x[:, : numel // 2] = 0.0
        x[:, numel // 4 : numel // 2] = -0.0
    return torch.full_like(x, -1.7) if kind == "constant" else x


def best() -> binding.Native:
    kernel, why = binding.load()
    assert kernel is not None, why
    return kernel


ISAS = binding.ISAS[: binding.ISAS.index(best().name.removeprefix("native/")) + 1]


@pytest.fixture(params=ISAS)
def kernel(request: pytest.FixtureRequest) -> binding.Native:
    loaded, why = binding.load(request.param)
    assert loaded is not None, why
    return loaded


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = BITS_OF.get(a.dtype, torch.uint8)
    return a.dtype == b.dtype and torch.equal(a.view(bits), b.view(bits))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec[:40])
def test_every_instruction_set_gives_the_bytes_of_the_reference(kernel: binding.Native, spec: str) -> None:
    codec = nc.codec(spec)
    recipe = codec.recipe(torch.device("cpu"))
    dtypes = list(BITS_OF)
    for case, (rows, numel) in enumerate([(2, 0), (1, 1), (3, 7), (2, 65), (3, 1000), (1, 4500)]):
        for kind in INPUTS:
            dtype = dtypes[(case + INPUTS.index(kind)) % 4]
            x = made(kind, rows, numel, case).to(dtype)
            x = x * 2 if kind == "huge" and dtype == torch.float64 else x  # past FLT_MAX
            expected = reference.encode(x, recipe, 5)
            data = torch.full_like(expected, 0xAB)
            kernel.encode(data, x, recipe, 5)
            assert torch.equal(data, expected), ("encode", rows, numel, kind, dtype)

            values = reference.decode(expected, numel, dtype, recipe)
            out = torch.full_like(values, 7)
            kernel.decode(out, expected, recipe)
            assert same_bits(out, values), ("decode", rows, numel, kind, dtype)

            for own in (None, x[0]):
                total = reference.decode_sum(expected, numel, dtype, recipe, own, rows - 1, rows)
                summed = torch.full_like(total, 7)
                kernel.decode_sum(summed, expected, recipe, own, rows - 1, rows)
                assert same_bits(summed, total), ("decode_sum", rows, numel, kind, dtype)

                row = reference.decode_sum_encode(expected, numel, recipe, own, rows - 1, rows, 9)
                reduced = torch.full_like(row, 0xAB)
                kernel.decode_sum_encode(reduced, expected, numel, recipe, own, rows - 1, rows, 9)
                assert torch.equal(reduced, row), ("reduce", rows, numel, kind, dtype)


@pytest.mark.parametrize(
    "spec", ["int8", "int4:block=65536", "sign", "nf4", "int8:block=row", "sign:block=row", "bf16"]
)
def test_long_rows_are_cut_into_parts_without_a_trace(kernel: binding.Native, spec: str) -> None:
    codec = nc.codec(spec)
    recipe = codec.recipe(torch.device("cpu"))
    x = made("non-finite" if "row" not in spec else "wide", 1, 200_003, 1)
    expected = reference.encode(x, recipe, 5)
    data = torch.full_like(expected, 0xAB)
    kernel.encode(data, x, recipe, 5)
    assert torch.equal(data, expected)
    reduced = torch.empty_like(expected[0])
    kernel.decode_sum_encode(reduced, torch.cat([expected, expected]), 200_003, recipe, None, 0, 2, 5)
    assert torch.equal(
        reduced, reference.decode_sum_encode(torch.cat([expected, expected]), 200_003, recipe, None, 0, 2, 5)
    )


def test_nothing_outside_the_buffers_is_touched() -> None:
    assert calls_that_survived("guard_pages.py", *ISAS) > 1000 * len(ISAS)


def test_the_number_of_threads_changes_nothing() -> None:
    x = torch.randn(3, 1_000_001)
    before = torch.get_num_threads()
    try:
        for spec in ("int4", "sign:block=row", "int8:stochastic=true", "apot8"):
            codec, results = nc.codec(spec), []
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                data = codec.encode(x, 3)
                results.append((data, codec.decode(data, x.shape[1]), codec.decode_sum_encode(data, x.shape[1], 3)))
            for result in results[1:]:
                assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    finally:
        torch.set_num_threads(before)


def test_two_threads_may_encode_at_once() -> None:
    inputs = [torch.randn(2_000_000, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected = [nc.encode(x, "int4").data for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            if not torch.equal(nc.encode(inputs[i], "int4").data, expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_other_python_threads_run_during_a_call() -> None:
    x = torch.randn(1, 1 << 25)
    codec, done, ticks, calls = nc.codec("apot8:block=8"), threading.Event(), [], []
    out = codec.encode(x)

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that a call lasts for many ticks, whatever the machine
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        for _ in range(5):
            start = time.perf_counter()
            codec.encode(x, out=out)
            calls.append((start, time.perf_counter()))
    finally:
        done.set()
        thread.join()
        torch.set_num_threads(threads)
    # A call that kept the GIL would leave no tick strictly inside it, for it is a single call into C.
    assert any(start + 0.002 < t < end - 0.002 for start, end in calls for t in ticks), calls


def test_a_forked_child_encodes_with_threads_of_its_own() -> None:
    x = torch.randn(4_000_000)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        expected = nc.encode(x, "int4").data
        holds_in_a_fork(lambda: bytes(nc.encode(x, "int4").data.numpy()) == bytes(expected.numpy()), 60)
    finally:
        torch.set_num_threads(before)


def test_denormals_count_even_where_torch_flushes_them() -> None:
    x = torch.full((64,), 8e-39)
    expected = nc.encode(x, "int8").data
    assert nc.decode(nc.encode(x, "int8")).min() > 0
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        flushed = nc.encode(x, "int8").data
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushed, expected)


def test_a_missing_core_is_said_once_and_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "find", lambda: None)
    monkeypatch.setattr(operators, "kernel_for", operators.kernel_for.__wrapped__)
    with pytest.warns(KernelWarning, match=r"reference on cpu.*no C\+\+ compiler.*pip install"):
        assert operators.kernel_for("cpu").name == "reference"


def test_a_kernel_that_the_cpu_lacks_is_refused() -> None:
    kernel, why = binding.load("avx1024")
    assert kernel is None
    assert "plain" in why


def test_which_kernel_names_the_instruction_set() -> None:
    assert nc.which_kernel("int4", "cpu") == best().name
    with pytest.raises(nc.errors.SpecError):
        nc.which_kernel("int44", "cpu")
