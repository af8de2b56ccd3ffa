"""Exact integer products: int64's numbers on every machine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrowcast.errors import DtypeError, ShapeError
from narrowcast.kernels import operators
from narrowcast.kernels.cpu import binding
from narrowcast.kernels.operators import Kernel
from narrowcast.kernels.operators.integer import LONGEST, integer_linear

# The operator is the same on any kernel: machines without a compiler check it on the reference.
pytestmark = pytest.mark.filterwarnings("ignore::narrowcast.errors.KernelWarning")

SIZES = [(1, 1, 1), (1, 5, 64), (2, 3, 63), (3, 4, 65), (4, 7, 128), (5, 64, 200), (9, 65, 33), (65, 130, 100)]
# From 16 vectors on VNNI takes another way: 8, 4 and 1 of them with up to 48 rows, in parts of 1024 elements.
SIZES += [(15, 48, 70), (16, 16, 3), (17, 17, 5), (29, 49, 1023), (16, 33, 1030), (300, 35, 4), (23, 48, 2052)]


def triton() -> Kernel:
    """What runs on CUDA: it pads for cuBLAS, and torch has the same function for the CPU, exact where there is VNNI."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if binding.load("avx512")[0] is None:
        pytest.skip("torch._int_mm saturates on CPUs without VNNI")
    from narrowcast.kernels.triton.launch import Triton

    return Triton()


@pytest.fixture(params=[*binding.ISAS, "reference", "triton"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    if request.param == "reference":
        return operators.Reference()
    if request.param == "triton":
        return triton()
    loaded, why = binding.load(request.param)
    if loaded is None:
        pytest.skip(why)
    return loaded


def codes(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(sum(shape)))


def assert_exact(kernel: Kernel, x: Tensor, weight: Tensor) -> None:
    out = torch.full((len(x), len(weight)), 7, dtype=torch.int32)
    kernel.integer_linear(out, x, weight)
    assert torch.equal(out.long(), x.long() @ weight.long().t())


@pytest.mark.parametrize("size", SIZES)
def test_every_machine_is_exact(kernel: Kernel, size: tuple[int, int, int]) -> None:
    batch, rows, k = size
    assert_exact(kernel, codes(batch, k), codes(rows, k))


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("value", [-128, 127])
def test_the_longest_sums_of_the_largest_products_are_exact(kernel: Kernel, value: int, batch: int) -> None:
    # Every element is the same sum, and that is known without int64's product, which takes long.
    x, weight = torch.full((batch, LONGEST), value, dtype=torch.int8), torch.full((2, LONGEST), -128, dtype=torch.int8)
    out = torch.full((batch, 2), 7, dtype=torch.int32)
    kernel.integer_linear(out, x, weight)
    assert out.tolist() == [[-128 * value * LONGEST] * 2] * batch


def test_rows_may_lie_apart(kernel: Kernel) -> None:
    assert_exact(kernel, codes(6, 90)[::2, 5:75], codes(10, 90)[1::3, 3:73])
    assert_exact(kernel, codes(70, 3).t(), codes(70, 4).t())
    assert_exact(kernel, codes(40, 90)[::2, 5:75], codes(60, 90)[1::3, 3:73])


@pytest.mark.parametrize("batch", [3, 20])
def test_results_may_lie_apart_and_nothing_between_them_changes(batch: int) -> None:
    kernel, why = binding.load()
    if kernel is None:
        pytest.skip(why)
    x, weight, out = codes(batch, 70), codes(19, 70), torch.full((batch, 40), 7, dtype=torch.int32)
    kernel.integer_linear(out[:, 5:24], x, weight)
    assert torch.equal(out[:, 5:24].long(), x.long() @ weight.long().t())
    assert out[:, :5].eq(7).all()
    assert out[:, 24:].eq(7).all()


def test_the_operator_works_in_one_graph_and_passes_torchs_checks() -> None:
    x, weight = codes(5, 40), codes(7, 40)
    result = torch.library.opcheck(torch.ops.narrowcast.integer_linear.default, (x, weight))
    assert set(result.values()) == {"SUCCESS"}
    compiled = torch.compile(integer_linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight), integer_linear(x, weight))


@pytest.mark.parametrize("batch", [10, 300])
def test_threads_change_nothing(batch: int) -> None:
    x, weight = codes(batch, 300), codes(500, 300)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(integer_linear(x, weight).long(), x.long() @ weight.long().t())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("batch", "rows", "k"), [(0, 3, 4), (3, 0, 4), (2, 3, 0)])
def test_nothing_gives_zeros(batch: int, rows: int, k: int) -> None:
    found = integer_linear(codes(batch, k), codes(rows, k))
    assert found.dtype == torch.int32
    assert torch.equal(found, torch.zeros(batch, rows, dtype=torch.int32))


def test_bad_input_is_named() -> None:
    with pytest.raises(DtypeError, match=r"weight has dtype torch\.uint8.*weight\.to\(torch\.int8\)"):
        integer_linear(codes(2, 3), codes(2, 3).view(torch.uint8))
    with pytest.raises(ShapeError, match=r"x has shape \(2, 3\) and weight \(2, 4\).*same k"):
        integer_linear(codes(2, 3), codes(2, 4))
    with pytest.raises(ShapeError, match=r"k=131072: a sum of more than 131071 products.*int64"):
        integer_linear(torch.zeros(1, 2**17, dtype=torch.int8), torch.zeros(1, 2**17, dtype=torch.int8))
