"""compat.apot: PyTorch's grids and codes, and what was wrong there, by the names of FACTS.md."""

from __future__ import annotations

import copy
import importlib
import inspect
import itertools
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowcast.compat import apot
from narrowcast.compat.apot import (
    APoTFakeQuantize,
    APoTObserver,
    APoTQuantizer,
    LinearAPoT,
    TensorAPoT,
    apot_to_float,
    dequantize_APoT,
    fake_quantize_function,
    float_to_apot,
    legacy,
    linear,
    quant_dequant_APoT,
    quant_dequant_util,
    quantize_APoT,
)
from narrowcast.errors import CalibrationError, GridError, NarrowcastError, PayloadError, QuantizeError, ShapeError

QParams = tuple[Tensor, Tensor, Tensor, Tensor]
GRIDS = [
    (4, 2, False),
    (4, 2, True),
    (6, 2, True),
    (8, 1, False),
    (8, 2, False),
    (8, 2, True),
    (8, 4, True),
    (12, 4, False),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def grid(b: int, k: int, signed: bool, alpha: float = 1.0, device: str = "cpu") -> QParams:
    observer = APoTObserver(b=b, k=k)
    observer(torch.tensor([-alpha if signed else 0.0, alpha], device=device))
    return observer.calculate_qparams(signed)


def inputs(signed: bool, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Numbers within and beyond [-1, 1], most of them near zero."""
    x = torch.randn(40, 50) ** 3
    return (x if signed else x.abs()).to(device, dtype)


# -- grids ------------------------------------------------------------------------------------------------------------


def test_the_papers_example_in_pytorchs_order() -> None:
    alpha, gamma, levels, codes = grid(4, 2, False)
    assert alpha.item() == 1.0
    assert gamma.item() == torch.tensor(1 / 1.5).item()
    # {0, 1, 1/4, 1/16} + {0, 1/2, 1/8, 1/32}, in units of gamma / 32
    units = [0, 1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 32, 33, 36, 48]
    assert levels.tolist() == [(gamma * unit / 32).item() for unit in units]
    assert codes.tolist() == [0, 3, 12, 15, 2, 14, 8, 11, 10, 1, 13, 9, 4, 7, 6, 5]


@pytest.mark.parametrize(("b", "k"), [(4, 2), (6, 2), (6, 3), (8, 2), (6, 1), (4, 4)])
def test_unsigned_codes_are_the_bit_fields_of_the_terms(b: int, k: int) -> None:
    _, gamma, levels, codes = grid(b, k, False, 3.0)
    terms = b // k
    by_code = dict(zip(codes.tolist(), levels.tolist(), strict=True))
    assert len(by_code) == 2**b
    for code, level in by_code.items():
        fields = [code >> (k * (terms - 1 - term)) & (2**k - 1) for term in range(terms)]
        exponents = [term + (field - 1) * terms for term, field in enumerate(fields) if field]
        assert level == (gamma * sum(2.0**-exponent for exponent in exponents)).item()


def test_signed_grids_have_49_entries_for_four_bits_and_are_symmetric() -> None:
    _, gamma, levels, codes = grid(4, 2, True)
    values = [1, 1 / 4, 1 / 16, 0, -1 / 16, -1 / 4, -1], [1 / 2, 1 / 8, 1 / 32, 0, -1 / 32, -1 / 8, -1 / 2]
    sums = torch.tensor([sum(pair) for pair in itertools.product(*values)])
    assert torch.equal(levels, (sums * gamma).sort().values)
    assert torch.equal(levels, (sums * gamma)[codes])
    assert sorted(codes.tolist()) == list(range(49))
    assert torch.equal(levels, -levels.flip(0))


def test_alpha_is_the_largest_magnitude_of_all_that_was_seen() -> None:
    observer = APoTObserver(4, 2)
    for batch in (torch.tensor([1.0, -3.0]), torch.tensor([[2.0]]), torch.empty(0)):
        assert observer(batch) is batch
    assert observer.calculate_qparams(True)[0].item() == 3.0
    assert observer.calculate_qparams(True, min_val=torch.tensor([0]), max_val=torch.tensor([5]))[0].item() == 5.0


def test_grids_that_cannot_be_are_refused_as_an_assertion() -> None:
    for b, k in ((0, 0), (4, 0), (4, 3), (-2, 2)):
        observer = APoTObserver(b=b, k=k)
        observer(torch.ones(2))
        with pytest.raises(AssertionError, match=rf"b={b}, k={k}: .*k is at least 1 and divides b") as caught:
            observer.calculate_qparams(signed=False)
        assert isinstance(caught.value, GridError)
    with pytest.raises(GridError, match=r"5764801 entries, more than 65536.*apot8"):
        grid(16, 2, True)


def test_an_observer_wants_data_and_finite_data() -> None:
    observer = APoTObserver(4, 2)
    with pytest.raises(CalibrationError, match="no data was observed"):
        observer.calculate_qparams(False)
    with pytest.raises(CalibrationError, match=r"infinity or a NaN.*Nothing of it was remembered"):
        observer(torch.tensor([1.0, torch.nan]))
    assert observer.min_val.numel() == 0


# -- codes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("b", "k", "signed"), GRIDS)
def test_a_number_gets_the_code_of_the_first_nearest_level(b: int, k: int, signed: bool) -> None:
    alpha, _, levels, codes = grid(b, k, signed)
    x = inputs(signed)
    some = levels[:: -(-len(levels) // 50)]
    x[0, : len(some)] = some
    distances = np.abs(x.double().clamp(-1, 1).reshape(-1, 1).numpy() - levels.double().numpy())
    expected = codes[torch.from_numpy(distances.argmin(1))].view_as(x)  # numpy's is the first of equals
    assert torch.equal(float_to_apot(x, levels, codes, alpha), expected)


def test_ties_go_to_the_lower_level() -> None:
    alpha, _, levels, codes = grid(4, 2, False, 1.5)  # gamma is 1, so that middles are exact
    middles = (levels[1:] + levels[:-1]) / 2
    assert torch.equal(float_to_apot(middles, levels, codes, alpha), codes[:-1])
    assert torch.equal(quant_dequant_util(middles, levels, codes), levels[:-1])


@pytest.mark.parametrize(("b", "k", "signed"), GRIDS)
def test_codes_stand_for_the_levels_and_survive_a_round_trip(b: int, k: int, signed: bool, device: str) -> None:
    qparams = grid(b, k, signed, device=device)
    quantized = quantize_APoT(inputs(signed, device=device), *qparams)
    values = dequantize_APoT(quantized)
    assert values.device.type == device
    assert torch.equal(apot_to_float(quantized.data, *qparams[2:]), values)
    assert torch.equal(quantize_APoT(values, *qparams).data, quantized.data)


def test_clipping_gives_alphas_level_and_not_alpha_as_the_code() -> None:
    qparams = grid(4, 2, False)
    for x in (3.0, torch.inf):
        assert float_to_apot(x, *qparams[2:], qparams[0]).item() == 5  # [01|01]: both largest terms
        assert dequantize_APoT(quantize_APoT(torch.tensor([x]), *qparams)).tolist() == [1.0]
    signed = grid(4, 2, True)
    assert dequantize_APoT(quantize_APoT(torch.tensor([-3.0, 3.0]), *signed)).tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_untouched_and_their_dtype_kept(
    dtype: torch.dtype, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    qparams = grid(4, 2, True, device=device)
    x = inputs(True, dtype, device)
    before = x.clone()
    quantized = quantize_APoT(x, *qparams)
    values = dequantize_APoT(quantized)
    assert values.dtype == dtype
    assert torch.equal(quant_dequant_APoT(x, *qparams), values)
    assert torch.equal(x, before)
    assert capsys.readouterr().out == ""  # dequantize printed


def test_codes_are_held_packed() -> None:
    x = torch.rand(3, 5, 7)
    for b, k, signed, bits in (
        (4, 2, False, 4),
        (4, 2, True, 6),
        (8, 2, False, 8),
        (2, 2, False, 2),
        (12, 4, False, 16),
    ):
        quantized = quantize_APoT(x, *grid(b, k, signed))
        assert quantized.nbytes == -(-x.numel() * bits // 8)
        assert quantized.data.dtype == torch.int32
        assert torch.equal(quantized.int_repr(), quantized.data)
        assert quantized.data.shape == x.shape
        assert torch.equal(quantized.dequantize(), dequantize_APoT(quantized))


def test_codes_of_16_bits_keep_their_value() -> None:
    quantizer = APoTQuantizer(*grid(16, 1, False))
    codes = torch.tensor([0, 1, 32767, 32768, 65535])
    assert TensorAPoT(quantizer, codes).data.tolist() == codes.tolist()


def test_a_nan_has_no_code_and_stays_a_nan_in_floats() -> None:
    qparams = grid(4, 2, True)
    x = torch.tensor([0.5, torch.nan])
    with pytest.raises(QuantizeError, match=r"x: holds a NaN, and no code stands for one.*nan_to_num"):
        quantize_APoT(x, *qparams)
    for some in (qparams, grid(8, 2, True)):
        assert quant_dequant_APoT(x, *some).isnan().tolist() == [False, True]


def test_a_code_that_does_not_exist_is_refused() -> None:
    _, _, levels, codes = grid(4, 2, False)
    with pytest.raises(PayloadError, match=r"x_apot: holds a code that is not one of the 16 in indices, 0 to 15"):
        apot_to_float(torch.tensor([3, 16]), levels, codes)
    with pytest.raises(PayloadError, match="not one of the 16"):
        apot_to_float(-1, levels, codes)
    with pytest.raises(PayloadError, match=r"not one of the 2 in indices, 0 to 2"):
        apot_to_float(torch.tensor([1]), torch.tensor([0.0, 1.0]), torch.tensor([0, 2]))


def test_plain_numbers_are_taken_too() -> None:
    alpha, _, levels, codes = grid(4, 2, False)
    assert float_to_apot(0.0215, levels, codes, alpha).item() == 3
    assert apot_to_float(3, levels, codes) == levels[1]
    assert quant_dequant_util(0.0215, levels, codes) == levels[1]


def test_the_clip_of_a_quantizer_can_be_asked_for() -> None:
    assert APoTQuantizer(*grid(4, 2, False, 2.5)).q_apot_alpha() == 2.5
    with pytest.raises(NotImplementedError, match="has no alpha"):
        APoTQuantizer.q_apot_alpha(object())  # type: ignore[arg-type]


def test_nothing_loops_over_elements() -> None:
    # Element by element in Python this is 15 s: 0.15 ms each.
    qparams = grid(4, 2, False)
    x = torch.rand(100_000)
    began = time.thread_time()
    dequantize_APoT(quantize_APoT(x, *qparams))
    assert time.thread_time() - began < 1.5


# -- fake quantization ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_passes_within_alpha_and_is_zero_beyond(dtype: torch.dtype, device: str) -> None:
    qparams = grid(4, 2, True, device=device)
    x = torch.tensor([-2.0, -1.0, -0.3, 0.0, 0.7, 1.0, 1.5], dtype=dtype, device=device, requires_grad=True)
    y = fake_quantize_function.apply(x, *qparams)
    assert y.dtype == dtype
    y.backward(torch.arange(1, 8, dtype=dtype, device=device))
    assert x.grad is not None
    assert x.grad.tolist() == [0, 2, 3, 4, 5, 6, 0]


def test_on_an_unsigned_grid_the_gradient_of_negative_numbers_passes_as_pytorchs_test_wants() -> None:
    x = torch.tensor([-0.5, -2.0], requires_grad=True)
    y = quant_dequant_APoT(x, *grid(4, 2, False))
    assert y.tolist() == [0.0, 0.0]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 0.0]


def test_negative_weights_are_quantized_and_not_zeroed() -> None:
    x = torch.randn(200)
    fake = APoTFakeQuantize(b=4, k=2)
    observer = APoTObserver(4, 2)
    observer(x)
    y = fake(x)
    assert torch.equal(y, dequantize_APoT(quantize_APoT(x, *observer.calculate_qparams(True))))
    assert len(fake.quantization_levels) == 49
    assert bool((y[x < -0.1] < 0).all())
    unsigned = APoTFakeQuantize(b=4, k=2, signed=False)
    assert bool((unsigned(x)[x < 0] == 0).all())


def test_data_that_is_never_negative_gets_the_unsigned_grid() -> None:
    x = torch.rand(200)
    fake = APoTFakeQuantize(b=4, k=2)
    assert torch.equal(fake(x), dequantize_APoT(quantize_APoT(x, *fake.calculate_qparams(signed=False))))
    assert len(fake.quantization_levels) == 16
    fake(-x)
    assert len(fake.quantization_levels) == 49


def test_observing_and_quantizing_are_switched_apart() -> None:
    fake = APoTFakeQuantize(b=4, k=2)
    fake.disable_observer()
    with pytest.raises(CalibrationError, match=r"no levels yet.*enable_observer\(\)"):
        fake(torch.ones(3))
    fake.enable_observer()
    fake.disable_fake_quant()
    x = torch.tensor([0.1, 1.0])
    assert fake(x) is x
    fake.disable_observer()
    fake.enable_fake_quant()
    assert fake(torch.tensor([5.0])).tolist() == [1.0]


def test_a_state_dict_carries_the_grid() -> None:
    fake = APoTFakeQuantize(b=4, k=2)
    x = torch.randn(50)
    y = fake(x)
    other = APoTFakeQuantize(b=4, k=2)
    other.load_state_dict(fake.half().state_dict())
    other.disable_observer()
    assert torch.equal(other(x), y)
    assert other.quantization_levels.dtype == torch.float32
    other(x * 5)
    assert torch.equal(other.alpha, x.abs().max())
    other.load_state_dict({**other.state_dict(), "activation_post_process.max_val": torch.tensor(7.0)})
    assert other(torch.tensor([9.0])).tolist() == [7.0]


def test_what_ranks_must_share_has_one_shape_whatever_the_data() -> None:
    # DDP broadcasts buffers: a rank that saw negative numbers and one that did not have different grids.
    fakes = [APoTFakeQuantize(b=4, k=2), APoTFakeQuantize(b=4, k=2)]
    for fake, x in zip(fakes, (torch.rand(5), torch.randn(5)), strict=True):
        fake(x)
    shapes = [[(name, buffer.shape) for name, buffer in fake.named_buffers()] for fake in fakes]
    assert shapes[0] == shapes[1]


def test_a_layer_trains_with_the_qconfigs() -> None:
    layer = torch.ao.nn.qat.Linear(8, 4, qconfig=apot.apot_weight_qconfig_4bit)
    layer(torch.randn(3, 8)).square().sum().backward()
    assert layer.weight.grad is not None
    assert bool((layer.weight.grad != 0).any())
    assert len(layer.weight_fake_quant.quantization_levels) == 49
    activation = apot.apot_qconfig_8bit.activation()
    assert (activation.activation_post_process.b, activation.dtype) == (8, torch.quint8)
    assert apot.uniform_qconfig_4bit.activation().quant_max == 15


# -- the linear layer -------------------------------------------------------------------------------------------------


def quantized(weight: Tensor, b: int, k: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and levels of a weight."""
    observer = APoTObserver(b, k)
    observer(weight)
    made = quantize_APoT(weight, *observer.calculate_qparams(signed))
    return made.data, dequantize_APoT(made)


@pytest.mark.parametrize(("b", "k", "rows"), [(4, 2, True), (2, 1, True), (6, 2, True), (8, 2, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_layer_multiplies_by_levels_and_adds_the_bias(b: int, k: int, rows: bool, dtype: torch.dtype) -> None:
    float_layer = nn.Linear(70, 33)
    layer = LinearAPoT.from_float(float_layer, b, k)
    codes, levels = quantized(float_layer.weight.detach(), b, k, True)
    assert torch.equal(layer.decoded(), levels)
    assert torch.equal(layer.weight, codes)
    assert torch.equal(layer.weight_transposed, codes.t())
    assert (layer.codec is not None) is rows
    x = torch.randn(2, 3, 70).to(dtype)
    y = layer(x)
    assert y.dtype == dtype
    # K products and sums, the weight and the bias round by 2**-24 of the sum of magnitudes each; 16 bits by more.
    size = x.double().abs() @ levels.double().abs().t() + float_layer.bias.double().abs()
    unit = 76 * 2.0**-24 + (0 if dtype == torch.float32 else 1.5 * torch.finfo(dtype).eps)
    exact = x.double() @ levels.double().t() + float_layer.bias.double()
    assert bool(((y.double() - exact).abs() <= unit * size).all())


def test_a_layer_of_four_bits_takes_six_a_weight() -> None:
    layer = LinearAPoT(torch.randn(8, 128), 4, 2)
    assert layer.held.nbytes == 8 * (128 * 6 // 8 + 16)


def test_legacy_multiplies_by_codes_as_pytorchs_test_linear_wants() -> None:
    for b, k in ((8, 1), (8, 2)):
        weight = 1000 * torch.rand(5, 3)
        activation = torch.randint(0, 255, (4, 3)).float()
        codes, _ = quantized(weight, b, k, False)
        expected = (activation.long() @ codes.long().t()).float()
        made = LinearAPoT(weight, b, k, legacy=True), legacy.LinearAPoT(weight, b, k), linear.LinearAPoT(weight, b, k)
        for layer in made:
            assert torch.equal(layer(activation), expected)
            assert torch.equal(layer(activation + 0.5), expected)  # it takes whole parts
        assert not torch.allclose(LinearAPoT(weight, b, k)(activation), expected)


def test_the_layer_keeps_its_levels_in_fp32_and_travels_in_a_state_dict() -> None:
    weight = torch.randn(6, 20)
    layer = LinearAPoT(weight, 4, 2, torch.randn(6))
    other = LinearAPoT(torch.randn(6, 20), 4, 2, torch.zeros(6))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 20)
    assert torch.equal(other(x), layer(x))
    half = copy.deepcopy(layer).half()
    assert torch.equal(half.decoded(), layer.decoded())
    assert half.bias.dtype == torch.float16


def test_zero_weights_and_integer_activations() -> None:
    assert LinearAPoT(torch.zeros(2, 4), 4, 2)(torch.ones(4)).tolist() == [0.0, 0.0]
    layer = LinearAPoT(torch.tensor([[1.0, -0.5]]), 4, 2)
    assert torch.equal(layer(torch.tensor([3, 2])), F.linear(torch.tensor([3.0, 2.0]), layer.decoded()))
    with pytest.raises(ShapeError, match=r"weight2quantize: expected \[out, in\]"):
        LinearAPoT(torch.zeros(4), 4, 2)


# -- imports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("quantizer", ["APoTQuantizer", "quantize_APoT", "dequantize_APoT", "quant_dequant_APoT"]),
        ("apot_utils", ["float_to_apot", "apot_to_float", "quant_dequant_util"]),
        ("APoT_tensor", ["TensorAPoT"]),
        ("observer", ["APoTObserver"]),
        ("fake_quantize", ["APoTFakeQuantize"]),
        ("fake_quantize_function", ["fake_quantize_function"]),
        ("qconfig", ["apot_qconfig_4bit", "apot_weight_qconfig_8bit", "uniform_qconfig_8bit"]),
        ("qconfig", ["default_symmetric_fake_quant", "default_weight_symmetric_fake_quant"]),
        ("adaround_loss", ["AdaptiveRoundingLoss"]),
        ("adaround_fake_quantize", ["AdaroundFakeQuantizer"]),
        ("adaround_optimization", ["AdaptiveRoundingOptimizer"]),
    ],
)
def test_pytorchs_files_have_their_names_here(file: str, names: list[str]) -> None:
    module = importlib.import_module(f"narrowcast.compat.apot.{file}")
    for name in names:
        assert getattr(module, name) is getattr(apot, name)


def test_errors_are_the_librarys_own() -> None:
    assert issubclass(GridError, NarrowcastError)
    assert list(inspect.signature(quantize_APoT).parameters) == [
        "tensor2quantize",
        "alpha",
        "gamma",
        "quantization_levels",
        "level_indices",
    ]
