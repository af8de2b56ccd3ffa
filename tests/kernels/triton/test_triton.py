"""The Triton kernels give the reference's bits.

On a CUDA machine they run there. Elsewhere Triton's interpreter runs them on CPU tensors, in a process of its own: the
interpreter must be asked for before Triton is imported, and then nothing else in that process can compile.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from cases import CODECS, DTYPES, FLT_MAX, mixed, same_bits
from narrowcast.codecs import Levels
from narrowcast.kernels import reference
from narrowcast.kernels import triton as gpu
from narrowcast.kernels.layout import Recipe, layout
from narrowcast.kernels.operators import Kernel
from narrowcast.kernels.reference import draws
from narrowcast.kernels.reference.draws import WORD
from processes import in_interpreter

CUDA = torch.cuda.is_available()
INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA else "cpu"

pytest.importorskip("triton", reason="Triton is not installed")
if not (CUDA or INTERPRETER):
    # One test here, which runs all of this file in the interpreter.
    CODECS = {}

SPECS = {
    **CODECS,
    **{
        spec: nc.codec(spec)
        for spec in (
            "int4:block=800",
            "int8:block=4096",
            "nf4:block=800,scale=fp16",
            "sign:block=4096",
            "int3:block=4096",
        )
        if CODECS
    },
}
EVERY = pytest.mark.parametrize("codec", SPECS.values(), ids=lambda codec: codec.spec[:48])
SOME = pytest.mark.parametrize(
    "codec",
    [SPECS[name] for name in ("raw", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "sign", "int3", "int4", "int8") if SPECS]
    + [SPECS[name] for name in ("nf4", "apot4", "int8:zero_point=true", "int4:stochastic=true") if SPECS],
    ids=lambda codec: codec.spec,
)
SIZES = (1, 7, 63, 64, 65)
here = pytest.mark.skipif(not (CUDA or INTERPRETER), reason="the interpreter runs this in a process of its own")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
"""numpy, behind the interpreter, remarks on infinities that the kernels mean to have."""


@pytest.fixture(scope="session")
def kernel() -> Kernel:
    found, why = gpu.load()
    assert found is not None, why
    return found


def rows_of_every_kind(numel: int, seed: int = 0, codec: nc.Codec | None = None) -> Tensor:
    """One row of each kind of number that has gone wrong somewhere; two long rows where `codec` has several blocks."""
    random = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    place = torch.arange(numel)
    infinite, lost = mixed(numel, seed + 1), mixed(numel, seed + 2)
    infinite[numel // 2] = -torch.inf
    lost[numel // 3] = torch.nan
    if numel > 200:
        lost[-1] = torch.tensor(-0x3FF00F, dtype=torch.int32).view(torch.float32)  # a NaN with a sign and a payload
    kinds = torch.stack(
        [
            random,
            mixed(numel, seed),
            torch.where(place % 37 == 5, random * 1e6, random),
            random * 2.0**-135,
            torch.where(place % 3 == 0, 0.0, -0.0),
            torch.zeros(numel),
            torch.where(place % 2 == 0, FLT_MAX, -FLT_MAX) * random.clamp(-1, 1),
            torch.full((numel,), -FLT_MAX),
            torch.full((numel,), 0.3),
            random.round() + 0.5,
            infinite,
            lost,
        ]
    )
    # The interpreter takes its time per row, whatever the row's length.
    return kinds if codec is None or codec.block == "row" else kinds.view(2, -1)


def recipe_of(codec: nc.Codec) -> tuple[Recipe, Recipe]:
    """The recipe on the device, and the reference's: on the CPU, where no fast path of torch replaces a division."""
    return codec.recipe(torch.device(DEVICE)), codec.recipe(torch.device("cpu"))


def encoded(kernel: Kernel, codec: nc.Codec, rows: Tensor, seed: int = 5) -> Tensor:
    out = torch.full((len(rows), codec.row_bytes(rows.shape[1])), 0xA5, dtype=torch.uint8, device=DEVICE)
    kernel.encode(out, rows.to(DEVICE), recipe_of(codec)[0], seed)
    return out.cpu()


def decoded(kernel: Kernel, codec: nc.Codec, data: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    out = torch.full((len(data), numel), 7.0, dtype=dtype, device=DEVICE)
    kernel.decode(out, data.to(DEVICE), recipe_of(codec)[0])
    return out.cpu()


def assert_sums_agree(
    kernel: Kernel, codec: nc.Codec, data: Tensor, numel: int, own: Tensor | None, own_rank: int, divisor: int
) -> None:
    recipe, plain = recipe_of(codec)
    mine = None if own is None else own.to(DEVICE)
    dtype = torch.float32 if divisor < 4 else torch.bfloat16
    total = torch.full((numel,), 7.0, dtype=dtype, device=DEVICE)
    kernel.decode_sum(total, data.to(DEVICE), recipe, mine, own_rank, divisor)
    assert same_bits(total.cpu(), reference.decode_sum(data, numel, dtype, plain, own, own_rank, divisor))
    out = torch.full((data.shape[1],), 0xA5, dtype=torch.uint8, device=DEVICE)
    kernel.decode_sum_encode(out, data.to(DEVICE), numel, recipe, mine, own_rank, divisor, 5)
    assert torch.equal(out.cpu(), reference.decode_sum_encode(data, numel, plain, own, own_rank, divisor, 5))


@pytest.mark.skipif(CUDA or INTERPRETER, reason="this process runs the kernels itself")
@pytest.mark.timeout(600)
def test_triton_gives_the_references_bits_in_its_interpreter() -> None:
    in_interpreter(__file__)


def test_a_missing_triton_is_a_reason_and_not_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "narrowcast.kernels.triton.launch", None)
    found, why = gpu.load()
    assert found is None
    assert "pip install triton" in why


@EVERY
def test_encode_gives_the_references_bytes(kernel: Kernel, codec: nc.Codec) -> None:
    rows = rows_of_every_kind(333, codec=codec)
    assert torch.equal(encoded(kernel, codec, rows), reference.encode(rows, recipe_of(codec)[1], 5))


@SOME
@pytest.mark.parametrize("numel", SIZES)
def test_encode_takes_rows_of_any_length(kernel: Kernel, codec: nc.Codec, numel: int) -> None:
    rows = rows_of_every_kind(numel)[[1, 6, 11]]
    assert torch.equal(encoded(kernel, codec, rows), reference.encode(rows, recipe_of(codec)[1], 5))


@SOME
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_encode_takes_every_float_dtype(kernel: Kernel, codec: nc.Codec, dtype: torch.dtype) -> None:
    rows = rows_of_every_kind(333, codec=codec).double()
    if dtype == torch.float64:
        rows[0, :4] = torch.tensor([1e300, -1e300, 1e-300, 3.4028235677973366e38])
    rows = rows.to(dtype)
    assert torch.equal(encoded(kernel, codec, rows), reference.encode(rows, recipe_of(codec)[1], 5))


@EVERY
def test_decode_gives_the_references_bits(kernel: Kernel, codec: nc.Codec) -> None:
    rows = rows_of_every_kind(201, codec=codec)
    data = reference.encode(rows, recipe_of(codec)[1], 5)
    want = reference.decode(data, rows.shape[1], torch.float32, recipe_of(codec)[1])
    assert same_bits(decoded(kernel, codec, data, rows.shape[1], torch.float32), want)


@SOME
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_decode_gives_every_float_dtype(kernel: Kernel, codec: nc.Codec, dtype: torch.dtype) -> None:
    rows = rows_of_every_kind(77, codec=codec)
    data = reference.encode(rows, recipe_of(codec)[1], 5)
    want = reference.decode(data, rows.shape[1], dtype, recipe_of(codec)[1])
    assert same_bits(decoded(kernel, codec, data, rows.shape[1], dtype), want)


@EVERY
def test_decode_reads_any_bytes_like_the_reference(kernel: Kernel, codec: nc.Codec) -> None:
    shape = (3, codec.row_bytes(500))
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    want = reference.decode(data, 500, torch.float32, recipe_of(codec)[1])
    assert same_bits(decoded(kernel, codec, data, 500, torch.float32), want)


@EVERY
def test_sums_run_in_rank_order_and_keep_the_own_row_exact(kernel: Kernel, codec: nc.Codec) -> None:
    data = reference.encode(three_ranks(codec), recipe_of(codec)[1], 5)
    own = rows_of_every_kind(40, 7)[1:11].reshape(-1)
    assert_sums_agree(kernel, codec, data, 400, own, 1, 3)


@SOME
@pytest.mark.parametrize(("own_rank", "divisor"), [(None, 1), (0, 4)])
def test_sums_take_any_rank_as_their_own(kernel: Kernel, codec: nc.Codec, own_rank: int | None, divisor: int) -> None:
    data = reference.encode(three_ranks(codec), recipe_of(codec)[1], 5)
    own = None if own_rank is None else -rows_of_every_kind(40, 7)[1:11].reshape(-1)
    assert_sums_agree(kernel, codec, data, 400, own, own_rank or 0, divisor)


def three_ranks(codec: nc.Codec) -> Tensor:
    """Rows of 400 elements, most kinds of number in each; row-wide blocks would be NaN with the last kinds."""
    kinds = slice(0, 10) if codec.block != "row" else slice(0, 5)
    return torch.stack(
        [rows_of_every_kind(400 // len(range(12)[kinds]), seed)[kinds].reshape(-1) for seed in (1, 2, 3)]
    )


@SOME
@pytest.mark.parametrize("ranks", [1, 20])
def test_sums_take_one_rank_and_many(kernel: Kernel, codec: nc.Codec, ranks: int) -> None:
    rows = torch.stack([mixed(130, seed) for seed in range(ranks)])
    data = reference.encode(rows, recipe_of(codec)[1], 5)
    for own in (None, rows[0].to(torch.float16)):
        assert_sums_agree(kernel, codec, data, 130, own, ranks - 1, ranks)


@pytest.mark.parametrize("codec", [c for c in SPECS.values() if c.block], ids=lambda codec: codec.spec[:48])
def test_blocks_larger_than_a_tile_take_two_passes_and_the_same_bytes(
    kernel: Kernel, codec: nc.Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    from narrowcast.kernels.triton import cuts

    monkeypatch.setattr(cuts, "ONE_PASS", 16)
    monkeypatch.setattr(cuts, "TILES", {key: cuts.Tile(128, 1) for key in cuts.TILES})
    monkeypatch.setattr(cuts, "SPLIT", 2)
    rows = rows_of_every_kind(150)[[2, 11]]
    data = reference.encode(rows, recipe_of(codec)[1], 5)
    assert torch.equal(encoded(kernel, codec, rows), data)
    want = reference.decode(data, 150, torch.float32, recipe_of(codec)[1])
    assert same_bits(decoded(kernel, codec, data, 150, torch.float32), want)
    assert_sums_agree(kernel, codec, data[:2], 150, None, 0, 1)


@pytest.mark.parametrize("spec", ["int4", "apot4", "levels:table=-8000|0|8000"] if SPECS else [])
def test_a_product_that_overflows_is_infinite_in_a_sum_too(kernel: Kernel, spec: str) -> None:
    codec = nc.codec(spec)
    recipe = recipe_of(codec)[1]
    data = reference.encode(torch.tensor([[-1.0] * 64, [1.0] * 64]), recipe, 0)
    largest = 127 - int(torch.tensor(recipe.peak).log2())  # a power of two that overflows the next time it is doubled
    scales = torch.tensor([[2.0**largest], [2.0 ** min(largest + 1, 127)]]).bfloat16()
    at = layout(recipe.format, 64).scales_offset
    data[:, at : at + 2] = scales.view(torch.uint8)
    assert_sums_agree(kernel, codec, data, 64, None, 0, 1)


@pytest.mark.parametrize("spec", ["sign", "int4", "int8:zero_point=true"] if SPECS else [])
@pytest.mark.parametrize("block", ["row", "16392"])
def test_long_rows_agree(kernel: Kernel, spec: str, block: str) -> None:
    codec = nc.codec(f"{spec}{',' if ':' in spec else ':'}block={block}")
    rows = torch.stack([mixed(20_003, seed) for seed in (0, 1)])
    data = reference.encode(rows, recipe_of(codec)[1], 5)
    assert torch.equal(encoded(kernel, codec, rows), data)
    want = reference.decode(data, 20_003, torch.float32, recipe_of(codec)[1])
    assert same_bits(decoded(kernel, codec, data, 20_003, torch.float32), want)


@SOME
@pytest.mark.parametrize("numel", [1024, 1024 + 24])
def test_full_tiles_and_the_last_one_agree(
    kernel: Kernel, codec: nc.Codec, numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from narrowcast.kernels.triton import cuts

    monkeypatch.setattr(cuts, "TILES", {key: cuts.Tile(512, 1) for key in cuts.TILES})
    monkeypatch.setattr(cuts, "SPLIT", 2)
    rows = mixed(numel).view(1, -1)
    data = reference.encode(rows, recipe_of(codec)[1], 5)
    assert torch.equal(encoded(kernel, codec, rows), data)
    want = reference.decode(data, numel, torch.float32, recipe_of(codec)[1])
    assert same_bits(decoded(kernel, codec, data, numel, torch.float32), want)
    assert_sums_agree(kernel, codec, data.expand(3, -1), numel, None, 0, 1)


@pytest.mark.parametrize("count", [3, 5, 17, 40, 200] if SPECS else [])
@pytest.mark.parametrize("spread", [1.0, 9.0])
def test_tables_of_any_spacing_are_searched_exactly(kernel: Kernel, count: int, spread: float) -> None:
    """`spread` 9 crowds the levels around zero, where one cell holds many."""
    levels = torch.linspace(-1, 1, count, dtype=torch.float64)
    codec = Levels(levels.sign() * levels.abs() ** spread, scale="fp32")
    thresholds = recipe_of(codec)[1].table[1]  # type: ignore[index]
    thresholds = thresholds[thresholds.isfinite()]
    infinity = torch.tensor(torch.inf)
    near = torch.cat([thresholds, thresholds.nextafter(infinity), thresholds.nextafter(-infinity)])
    blocks = torch.nn.functional.pad(near, (0, -len(near) % 63)).view(-1, 63)
    # The block's own largest level makes the scale 1, so that y is x.
    rows = torch.nn.functional.pad(blocks, (0, 1), value=1.0)
    rows = rows.reshape(1, -1)
    codec = Levels(levels.sign() * levels.abs() ** spread, scale="fp32", block=64)
    assert torch.equal(encoded(kernel, codec, rows), reference.encode(rows, recipe_of(codec)[1], 5))


@SOME
def test_strides_and_misalignment_change_nothing(kernel: Kernel, codec: nc.Codec) -> None:
    recipe, plain = recipe_of(codec)
    rows = rows_of_every_kind(150)
    data = reference.encode(rows, plain, 5)
    wide = torch.zeros(len(rows), 211)
    wide[:, 3:153] = rows
    apart = torch.zeros(len(rows), 150, 2)
    apart[..., 0] = rows
    for view in (wide.to(DEVICE)[:, 3:153], apart.to(DEVICE)[..., 0]):
        room = torch.full((data.numel() + 3,), 0xA5, dtype=torch.uint8, device=DEVICE)
        kernel.encode(room[3:].view(data.shape), view, recipe, 5)
        assert torch.equal(room[3:].view(data.shape).cpu(), data)
        assert room[:3].tolist() == [0xA5] * 3
    padded = torch.nn.functional.pad(data, (5, 2)).to(DEVICE)[:, 5 : 5 + data.shape[1]]
    out = torch.full((len(rows), 160), 7.0, device=DEVICE)
    kernel.decode(out[:, 1:151], padded, recipe)
    assert same_bits(out[:, 1:151].cpu(), reference.decode(data, 150, torch.float32, plain))
    assert out[:, 151:].eq(7.0).all()


@SOME
def test_nothing_is_something_to_encode(kernel: Kernel, codec: nc.Codec) -> None:
    assert encoded(kernel, codec, torch.zeros(3, 0)).shape == (3, 0)
    assert encoded(kernel, codec, torch.zeros(0, 9)).shape == (0, codec.row_bytes(9))
    assert decoded(kernel, codec, torch.zeros(3, 0, dtype=torch.uint8), 0, torch.float32).shape == (3, 0)
    assert_sums_agree(kernel, codec, torch.zeros(2, 0, dtype=torch.uint8), 0, None, 0, 1)


if CUDA or INTERPRETER:
    import triton
    import triton.language as tl

    from narrowcast.kernels.triton.codes import mix64, uniform

    @triton.jit
    def draw(out, seed, start):  # type: ignore[no-untyped-def]
        index = tl.arange(0, 16)
        tl.store(out + index, uniform(mix64(seed.to(tl.uint64)), start.to(tl.int64), index))


@here
def test_draws_go_on_beyond_four_billion_elements() -> None:
    seed, start = int(draws.mix64(torch.tensor(11))), 3 * 2**32 - 5
    out = torch.zeros(16, device=DEVICE)
    draw[(1,)](out, seed, start)
    key = draws.mix64(torch.tensor(seed))
    want = torch.stack([reference_draw(key, torch.tensor(start + i)) for i in range(16)])
    assert torch.equal(out.cpu(), want)


def reference_draw(row_key: Tensor, index: Tensor) -> Tensor:
    """`reference.uniform` of one element, at an index that no test has the memory to reach."""
    key = draws.mix64(row_key + (index >> 32))
    x = (index & WORD) ^ (key & WORD)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & WORD
    x = x ^ ((key >> 32) & WORD)
    x = ((x ^ (x >> 15)) * 0x846CA68B) & WORD
    x = x ^ (x >> 16)
    return (x >> 8).float() * 2.0**-24


@pytest.mark.skipif(not INTERPRETER, reason="needs Triton's interpreter")
def test_the_interpreter_leaves_the_language_as_it_was(kernel: Kernel) -> None:
    """What stays wrapped after a launch the next wraps again: each is slower than the one before (interpreter.py)."""
    if not hasattr(triton.runtime.interpreter, "_LangPatchScope"):
        pytest.skip("this Triton never takes its wrappings off")
    functions = {name: getattr(tl.core, name) for name in ("load", "store", "reduce")}
    encoded(kernel, nc.codec("int8"), torch.ones(2, 200))
    assert {name: getattr(tl.core, name) for name in functions} == functions
    assert functions["load"].__name__ == "load"


# -- what only a GPU can show -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["int8", "int4", "int8:block=row", "fp8_e4m3"] if CUDA else [])
@pytest.mark.gpu
def test_offsets_beyond_two_billion_elements_are_right(kernel: Kernel, spec: str) -> None:
    codec, numel = nc.codec(spec), 2**31 + 1024 + 5
    recipe, _ = recipe_of(codec)
    x = torch.zeros(1, numel, dtype=torch.bfloat16, device="cuda")
    tail = torch.randn(3 * 1024 + 5, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    x[0, -len(tail) :] = tail.bfloat16()
    data = torch.full((1, codec.row_bytes(numel)), 0xA5, dtype=torch.uint8, device="cuda")
    kernel.encode(data, x, recipe, 0)
    back = torch.full((1, numel), 7.0, dtype=torch.bfloat16, device="cuda")
    kernel.decode(back, data, recipe)
    # The tail alone starts at a block of its own (blocks divide 1024), so it has the same codes and scales.
    short = x[:, -len(tail) :].contiguous()
    want = reference.decode(reference.encode(short, recipe, 0), len(tail), torch.bfloat16, recipe)
    assert same_bits(back[:, -len(tail) :].cpu(), want.cpu())
    assert not back[0, : numel - len(tail)].any()
    assert layout(codec.format, numel).row_bytes == data.shape[1]


@pytest.mark.parametrize("spec", ["int8", "nf4", "fp8_e4m3"] if CUDA else [])
@pytest.mark.gpu
def test_compiled_functions_call_the_same_kernels(spec: str) -> None:
    codec = nc.codec(spec)
    x = torch.randn(4, 1000, device="cuda")

    def through(x: Tensor) -> Tensor:
        return codec.decode(codec.encode(x * 2), 1000)

    assert same_bits(torch.compile(through, fullgraph=True)(x).cpu(), through(x).cpu())


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs CUDA")
def test_a_cuda_tensor_is_encoded_by_triton() -> None:
    assert nc.which_kernel("int8", "cuda") == "triton"
