"""No kernel gets an address that it would read or write past the end of: what does not fit is refused in words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowcast as nc
from cases import kernels, same_bits
from narrowcast.errors import DtypeError, ShapeError
from narrowcast.kernels.contract import Kernel
from narrowcast.kernels.layout import Grid, Recipe

KERNELS = kernels("cpu")
CODEC = nc.codec("nf4")
RECIPE = CODEC.recipe(torch.device("cpu"))
NUMEL, RANKS = 70, 3
X = torch.randn(RANKS, NUMEL, generator=torch.Generator().manual_seed(0))
ROWS = CODEC.encode(X)
WIDTH = ROWS.shape[1]
GRID = Grid(torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([-0.5, 1.0]), False)


def byte_room(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8)


def without_table() -> Recipe:
    return RECIPE._replace(table=None)


def with_table(table: Tensor) -> Recipe:
    return RECIPE._replace(table=table)


TABLE = RECIPE.table
assert TABLE is not None
ENCODE = [
    (
        lambda k: k.encode(byte_room(RANKS, WIDTH), X.long(), RECIPE, 0),
        DtypeError,
        r"rows: expected .*float32.*got int64",
    ),
    (lambda k: k.encode(byte_room(RANKS, WIDTH), X[0], RECIPE, 0), ShapeError, r"rows: expected a matrix"),
    (
        lambda k: k.encode(byte_room(RANKS, WIDTH - 1), X, RECIPE, 0),
        ShapeError,
        r"out: expected shape \(3, 48\), got \(3, 47\)",
    ),
    (lambda k: k.encode(byte_room(2, WIDTH), X, RECIPE, 0), ShapeError, r"out: expected shape \(3, 48\)"),
    (lambda k: k.encode(torch.empty(RANKS, WIDTH), X, RECIPE, 0), DtypeError, r"out: expected uint8, got float32"),
    (
        lambda k: k.encode(byte_room(1, WIDTH).expand(RANKS, -1), X, RECIPE, 0),
        ShapeError,
        r"out: .*strides are \(0, 1\)",
    ),
    (lambda k: k.encode(byte_room(WIDTH, RANKS).t(), X, RECIPE, 0), ShapeError, r"out: .*Pass a contiguous tensor"),
    (
        lambda k: k.encode(byte_room(RANKS, WIDTH), X, without_table(), 0),
        ShapeError,
        r"table: a recipe of LEVELS codes lacks",
    ),
    (
        lambda k: k.encode(byte_room(RANKS, WIDTH), X, with_table(TABLE.bfloat16()), 0),
        DtypeError,
        r"table: expected float32, got bfloat16",
    ),
    (
        lambda k: k.encode(byte_room(RANKS, WIDTH), X, with_table(TABLE[:, :8]), 0),
        ShapeError,
        r"table: expected shape \(2, 16\)",
    ),
    (
        lambda k: k.encode(byte_room(RANKS, WIDTH), X, with_table(TABLE.t().contiguous().t()), 0),
        ShapeError,
        r"table: must be contiguous",
    ),
    (
        lambda k: k.encode(byte_room(RANKS, 80), X, nc.codec("int8").recipe(X.device)._replace(table=TABLE), 0),
        ShapeError,
        r"INT codes has one",
    ),
    (
        lambda k: k.encode(byte_room(RANKS, WIDTH).to("meta"), X, RECIPE, 0),
        ShapeError,
        r"out: is on meta, the others on cpu",
    ),
]
DECODE = [
    (
        lambda k: k.decode(torch.empty(RANKS, NUMEL), ROWS[:, :-1], RECIPE),
        ShapeError,
        r"data: expected shape \(3, 48\), got \(3, 47\)",
    ),
    (lambda k: k.decode(torch.empty(RANKS + 1, NUMEL), ROWS, RECIPE), ShapeError, r"out: expected shape \(3, 70\)"),
    (lambda k: k.decode(torch.empty(RANKS, NUMEL), ROWS.float(), RECIPE), DtypeError, r"data: expected uint8"),
    (
        lambda k: k.decode(torch.empty(RANKS, NUMEL).long(), ROWS, RECIPE),
        DtypeError,
        r"that of out: expected.*got int64",
    ),
    (lambda k: k.decode(torch.empty(NUMEL, RANKS).t(), ROWS, RECIPE), ShapeError, r"out: "),
    (lambda k: k.decode_sum(torch.empty(NUMEL + 40), ROWS, RECIPE, None, -1, 1), ShapeError, r"data: expected shape"),
    (
        lambda k: k.decode_sum(torch.empty(2 * NUMEL)[::2], ROWS, RECIPE, None, -1, 1),
        ShapeError,
        r"out: must be contiguous",
    ),
    (
        lambda k: k.decode_sum(torch.empty(NUMEL), ROWS, RECIPE, X[0, :-1], 0, 1),
        ShapeError,
        r"own: expected shape \(70,\), got \(69,\)",
    ),
    (lambda k: k.decode_sum(torch.empty(NUMEL), ROWS, RECIPE, X[0].long(), 0, 1), DtypeError, r"own: expected"),
    (
        lambda k: k.decode_sum(torch.empty(NUMEL), ROWS, RECIPE, torch.empty(2 * NUMEL)[::2], 0, 1),
        ShapeError,
        r"own: must be contiguous",
    ),
    (lambda k: k.decode_sum(torch.empty(NUMEL), ROWS, RECIPE, X[0], 3, 1), ShapeError, r"own_rank=3"),
    (lambda k: k.decode_sum(torch.empty(NUMEL), ROWS, RECIPE, None, -1, 0), ShapeError, r"divisor=0"),
    (
        lambda k: k.decode_sum(torch.empty(NUMEL), ROWS[:0], RECIPE, None, -1, 1),
        ShapeError,
        r"data: expected shape \(1, 48\)",
    ),
    (
        lambda k: k.decode_sum_encode(byte_room(WIDTH - 16), ROWS, NUMEL, RECIPE, None, -1, 1, 0),
        ShapeError,
        r"out: expected shape \(48,\)",
    ),
    (
        lambda k: k.decode_sum_encode(byte_room(WIDTH), ROWS, NUMEL + 40, RECIPE, None, -1, 1, 0),
        ShapeError,
        r"data: expected shape",
    ),
    (
        lambda k: k.decode_sum_encode(byte_room(WIDTH), ROWS, NUMEL, RECIPE, X[:, 0], 0, 1, 0),
        ShapeError,
        r"own: expected shape",
    ),
]
LINEAR = [
    (
        lambda k: k.linear(torch.empty(2, RANKS), X[:2], ROWS, RECIPE, torch.ones(1)),
        ShapeError,
        r"bias: expected shape \(3,\), got \(1,\)",
    ),
    (
        lambda k: k.linear(torch.empty(2, RANKS), X[:2], ROWS, RECIPE, torch.ones(4)),
        ShapeError,
        r"bias: expected shape",
    ),
    (
        lambda k: k.linear(torch.empty(2, RANKS), X[:2], ROWS, RECIPE, torch.ones(1, 3)),
        ShapeError,
        r"bias: expected shape",
    ),
    (
        lambda k: k.linear(torch.empty(2, RANKS), X[:2], ROWS, RECIPE, torch.ones(3).long()),
        DtypeError,
        r"bias: expected",
    ),
    (
        lambda k: k.linear(torch.empty(2, RANKS), X[:2, :-40], ROWS, RECIPE, None),
        ShapeError,
        r"data: expected shape \(3, 32\)",
    ),
    (lambda k: k.linear(torch.empty(2, RANKS + 1), X[:2], ROWS, RECIPE, None), ShapeError, r"out: expected shape"),
    (
        lambda k: k.linear(torch.empty(2, RANKS).half(), X[:2], ROWS, RECIPE, None),
        DtypeError,
        r"out: expected float32, got float16",
    ),
    (
        lambda k: k.linear(torch.empty(2, RANKS), X[:2], ROWS.float(), RECIPE, None),
        DtypeError,
        r"data: expected uint8, got float32",
    ),
    (
        lambda k: k.integer_linear(byte_room(2, 2).int(), byte_room(2, 8).char(), byte_room(2, 9).char()),
        ShapeError,
        r"weight: expected shape \(2, 8\)",
    ),
    (
        lambda k: k.integer_linear(byte_room(2, 2), byte_room(2, 8).char(), byte_room(2, 8).char()),
        DtypeError,
        r"out: expected int32",
    ),
]


def faked(k: Kernel, x: Tensor, scale: Tensor, grid: Grid = GRID, out: Tensor | None = None) -> None:
    k.fake_quantize(torch.empty_like(x) if out is None else out, x, scale, grid)


SLICES = X.view(1, RANKS, NUMEL)
FAKE = [
    (lambda k: faked(k, SLICES, torch.ones(2)), ShapeError, r"scale: expected shape \(3,\), got \(2,\)"),
    (lambda k: faked(k, SLICES, torch.ones(3).double()), DtypeError, r"scale: expected float32"),
    (lambda k: faked(k, SLICES.transpose(1, 2), torch.ones(NUMEL)), ShapeError, r"x: must be contiguous"),
    (lambda k: faked(k, SLICES, torch.ones(3), out=torch.empty(1, 3, 69)), ShapeError, r"out: expected shape"),
    (
        lambda k: faked(k, SLICES, torch.ones(3), GRID._replace(thresholds=torch.ones(1))),
        ShapeError,
        r"thresholds: expected shape \(2,\)",
    ),
    (
        lambda k: faked(k, SLICES, torch.ones(3), GRID._replace(levels=GRID.levels.bfloat16())),
        DtypeError,
        r"levels: expected float32",
    ),
    (
        lambda k: faked(k, SLICES, torch.ones(3), Grid(torch.arange(300.0), torch.arange(299.0), False)),
        ShapeError,
        r"at most 256",
    ),
    (
        lambda k: k.fake_quantize_backward(
            torch.empty_like(SLICES), torch.ones(3), SLICES[:, :2], SLICES, torch.ones(3), GRID
        ),
        ShapeError,
        r"grad: expected",
    ),
    (
        lambda k: k.fake_quantize_backward(
            torch.empty_like(SLICES), torch.ones(1), SLICES, SLICES, torch.ones(3), GRID
        ),
        ShapeError,
        r"dscale: expected",
    ),
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("call", "error", "says"), [*ENCODE, *DECODE, *LINEAR, *FAKE])
def test_what_does_not_fit_is_refused(
    kernel: str, call: Callable[[Kernel], None], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        call(KERNELS[kernel])


def test_the_operators_of_torch_refuse_it_too() -> None:
    with pytest.raises(ShapeError, match="bias: expected shape"):
        torch.ops.narrowcast.linear(X[:2], ROWS, *RECIPE, torch.ones(1))
    with pytest.raises(ShapeError, match="out: expected shape"):
        torch.ops.narrowcast.encode_(byte_room(RANKS, 16), X, *RECIPE, 0)


# -- a bias of another shape ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [torch.tensor([0.75]), torch.tensor(0.75), torch.tensor([0.75], dtype=torch.float64)])
@pytest.mark.parametrize("batch", [2, 100])
def test_a_bias_of_one_element_counts_for_every_output(bias: Tensor, batch: int) -> None:
    x = torch.randn(batch, NUMEL)
    expected = CODEC.linear(x, ROWS, torch.full((RANKS,), 0.75))
    assert same_bits(CODEC.linear(x, ROWS, bias), expected)
    close = F.linear(x, CODEC.decode(ROWS, NUMEL), bias.float().reshape(1))
    assert torch.allclose(expected, close, atol=1e-4)


def test_its_gradient_is_the_sum_over_all_outputs() -> None:
    bias = torch.tensor([0.75], requires_grad=True)
    CODEC.linear(X, ROWS, bias).sum().backward()
    assert bias.grad is not None
    assert bias.grad.tolist() == [RANKS * RANKS]


@pytest.mark.parametrize(
    ("bias", "error", "says"),
    [
        (torch.ones(2), ShapeError, r"bias: expected one element for each of the 3 outputs, or one for all.*\(2,\)"),
        (torch.ones(4), ShapeError, r"bias: .*\(4,\)"),
        (torch.ones(1, 3), ShapeError, r"bias: .*\(1, 3\).*linear\(x\) \+ bias"),
        (torch.ones(0), ShapeError, r"bias: .*\(0,\)"),
        (torch.ones(3, dtype=torch.int64), DtypeError, r"bias: expected .*float32.*got int64"),
        (torch.ones(1, dtype=torch.int64), DtypeError, r"bias: expected .*float32.*got int64"),
    ],
)
@pytest.mark.parametrize("batch", [2, 100])
def test_any_other_bias_is_refused(bias: Tensor, error: type[Exception], says: str, batch: int) -> None:
    with pytest.raises(error, match=says):
        CODEC.linear(torch.randn(batch, NUMEL), ROWS, bias)


def test_a_layer_whose_bias_torch_broadcasts_computes_what_it_did() -> None:
    layer = nn.Linear(64, 32)
    layer.bias = nn.Parameter(torch.tensor([0.5]))
    x = torch.randn(5, 64)
    quantized = nc.nn.Linear.from_float(layer, "raw")
    assert torch.allclose(quantized(x), layer(x), atol=1e-5)


def test_an_x_or_bias_that_is_a_negated_view_counts_as_the_numbers_it_shows() -> None:
    x, bias = X[:2], torch.randn(RANKS)
    expected = CODEC.linear(x, ROWS, bias)
    assert same_bits(CODEC.linear(torch._neg_view(-x), ROWS, torch._neg_view(-bias)), expected)
    from narrowcast.kernels.operators.fake_quantize import fake_quantize

    scale = torch.full((1,), 0.5)
    assert same_bits(fake_quantize(torch._neg_view(-x), scale, GRID, None), fake_quantize(x, scale, GRID, None))


# -- out over what is read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["raw", "bf16", "int8", "int4:block=row", "nf4", "sign"])
@pytest.mark.parametrize("offset", [0, 16, 64])
def test_rows_may_be_encoded_over_the_floats_they_come_from(spec: str, offset: int) -> None:
    codec, memory = nc.codec(spec), torch.zeros(4 * 1000 + 256, dtype=torch.uint8)
    x = memory[: 4 * 1000].view(torch.float32)
    x.copy_(torch.randn(1000))
    expected = codec.encode(x)
    out = memory[offset : offset + codec.row_bytes(1000)]
    assert codec.encode(x, out=out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("spec", ["raw", "bf16", "int8", "int4:block=row", "nf4", "sign"])
@pytest.mark.parametrize("offset", [0, 16, 64])
def test_floats_may_be_decoded_over_the_bytes_they_come_from(spec: str, offset: int) -> None:
    codec, memory = nc.codec(spec), torch.zeros(4 * 1000 + 256, dtype=torch.uint8)
    row = memory[offset : offset + codec.row_bytes(1000)]
    row.copy_(codec.encode(torch.randn(1000)))
    expected = codec.decode(row, 1000)
    out = memory[:4000].view(torch.float32)
    payload = nc.Payload(row, codec, torch.Size([1000]), torch.float32)
    nc.decode(payload, out=out)
    assert same_bits(out, expected)


@pytest.mark.parametrize("shift", [0, 1, 7])
@pytest.mark.parametrize("own_rank", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_may_replace_its_own_row_or_lie_beside_it(shift: int, own_rank: int, dtype: torch.dtype) -> None:
    codec = nc.codec("int8")
    rows = codec.encode(torch.randn(3, 5000))
    memory = torch.randn(5008)
    own = memory[:5000] if dtype == torch.float32 else memory[:2500].view(dtype)
    expected = codec.decode_sum(rows, 5000, own=own.clone(), own_rank=own_rank)
    out = memory[shift : 5000 + shift]
    codec.decode_sum(rows, 5000, own=own, own_rank=own_rank, out=out)
    assert same_bits(out, expected)


def test_a_reduction_may_replace_one_of_the_rows_it_sums() -> None:
    codec = nc.codec("int4")
    rows = codec.encode(torch.randn(3, 5000))
    expected = codec.decode_sum_encode(rows, 5000)
    codec.decode_sum_encode(rows, 5000, out=rows[1])
    assert torch.equal(rows[1], expected)
