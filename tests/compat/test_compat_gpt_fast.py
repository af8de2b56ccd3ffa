"""compat.gpt_fast: the original's numbers and keys, and what was wrong there, by the names of FACTS.md."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc
from narrowcast.compat.gpt_fast import (
    WeightOnlyInt8Embedding,
    WeightOnlyInt8Linear,
    WeightOnlyInt8QuantHandler,
    dynamically_quantize_per_channel,
    replace_linear_weight_only_int8_per_channel,
)
from narrowcast.errors import DtypeError, PayloadError, QuantizeError, ShapeError, SpecError


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Tied(nn.Module):
    """An embedding and a head with one weight, and an attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(tokens)))


def converted(model: nn.Module, **options: object) -> nn.Module:
    return WeightOnlyInt8QuantHandler(copy.deepcopy(model), **options).convert_for_runtime()


def assert_product(y: Tensor, x: Tensor, linear: WeightOnlyInt8Linear) -> None:
    """y is x W^T + b, with W the codes times the scales, but for roundings.

    In units of s = |x| |W|^T + |b|: K products and K + 1 sums round by 2**-24 each, as may each weight and the bias;
    (K + 6) 2**-24 covers them. A result of 16 bits rounds once more, and where x has 16 bits the weight and the bias
    may be rounded to them, too: 3 eps / 2.
    """
    weight = linear.weight.double() * linear.scales.double().unsqueeze(1)
    bias = torch.zeros(len(weight), dtype=torch.float64) if linear.bias is None else linear.bias.double()
    size = x.double().abs() @ weight.abs().t() + bias.abs()
    bound = (x.shape[-1] + 6) * 2.0**-24 * size
    if x.element_size() == 2:
        bound = bound + 1.5 * torch.finfo(x.dtype).eps * size + torch.finfo(x.dtype).smallest_normal
    assert y.dtype == x.dtype
    assert bool(((y.double() - (x.double() @ weight.t() + bias)).abs() <= bound).all())


# -- the numbers ------------------------------------------------------------------------------------------------------


def test_a_hand_worked_row() -> None:
    # The scale is 127.5 / 127.5; halves go to even numbers.
    x = torch.tensor([[64.2, -127.5, 30.5, 0.0]])
    codes, scales, zeros = dynamically_quantize_per_channel(x, -128, 127, torch.int8)
    assert codes.tolist() == [[64, -128, 30, 0]]
    assert scales.tolist() == [1.0]
    assert zeros.tolist() == [0]
    assert (codes.dtype, zeros.dtype) == (torch.int8, torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_codes_and_scales_are_those_of_the_formula(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(40, 70, device=device).to(dtype)
    x[3] *= 1e-6  # below the floor of scales, where every dtype has digits for it
    x[5] = 0
    scale = (x.abs().amax(1) / 127.5).clamp(min=torch.finfo(torch.float32).eps)
    expected = (x / scale[:, None]).round().clamp(-128, 127)
    before = x.clone()
    codes, scales, _ = dynamically_quantize_per_channel(x, -128, 127, torch.int8)
    assert torch.equal(codes.to(dtype), expected)
    assert torch.equal(scales, scale)
    assert scales.dtype == dtype
    assert torch.equal(x, before)


def test_an_infinity_or_a_nan_makes_its_row_nan_where_the_original_silently_zeroed_it() -> None:
    x = torch.randn(4, 8)
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    codes, scales, _ = dynamically_quantize_per_channel(x, -128, 127, torch.int8)
    assert scales.isnan().tolist() == [False, True, True, False]
    assert torch.equal(codes[[0, 3]], dynamically_quantize_per_channel(x[[0, 3]], -128, 127, torch.int8)[0])
    layer = nn.Linear(8, 4)
    layer.weight.data.copy_(x)
    y = converted(layer)(torch.ones(8))
    assert y.isnan().tolist() == [False, True, True, False]


def test_a_state_dict_of_weights_that_are_not_finite_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))
    model[1].weight.data[2, 1] = torch.inf
    with pytest.raises(QuantizeError, match=r"1\.weight: weights hold an infinity or a NaN.*skip="):
        WeightOnlyInt8QuantHandler(model).create_quantized_state_dict()
    state = WeightOnlyInt8QuantHandler(model, skip=["1"]).create_quantized_state_dict()
    assert state["0.weight"].dtype == torch.int8
    assert state["1.weight"].dtype == torch.float32


# -- the runtime layer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_layer_multiplies_with_codes_times_scales_and_keeps_the_bias_and_the_dtype(
    dtype: torch.dtype, device: str
) -> None:
    layer = converted(nn.Linear(70, 33)).to(device, dtype)
    for shape in ((70,), (1, 70), (2, 3, 70)):
        x = torch.randn(shape, dtype=dtype, device=device)
        assert_product(layer(x).cpu(), x.cpu(), copy.deepcopy(layer).cpu())
    assert layer.scales.dtype == dtype


def test_scaling_does_not_overflow_fp16_as_it_did_after_the_product() -> None:
    layer = nn.Linear(1024, 2, bias=False)
    layer.weight.data.fill_(0.01)
    layer = converted(layer.half())
    x = torch.ones(1, 1024, dtype=torch.float16)
    assert bool(F.linear(x.float(), layer.weight.float()).half().isinf().all())  # what was scaled too late
    assert_product(layer(x), x, layer)


def test_one_operator_of_ours_runs_and_the_weight_is_never_rebuilt() -> None:
    # The original's eager mode makes a float copy of the weight on every call, and Inductor rewrites its pattern.
    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    called: list[str] = []
    layer = converted(nn.Linear(64, 48))
    with torch.no_grad(), Calls():
        layer(torch.ones(1, 64))
    assert called == ["aten.ones.default", "narrowcast.linear.default"]


def test_codes_and_scales_are_held_once() -> None:
    layer = converted(nn.Linear(64, 48, bias=False))
    held = [*layer.parameters(), *layer.buffers()]
    assert sum(tensor.nbytes for tensor in held) == 48 * (64 + 16)  # a scale, and padding to 16 bytes
    assert layer.weight.untyped_storage().data_ptr() == held[0].untyped_storage().data_ptr()


def test_gradients_pass_to_the_input_and_the_bias() -> None:
    layer = converted(nn.Linear(6, 3))
    x = torch.randn(2, 6, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, layer.decoded().sum(0).expand(2, 6), rtol=1e-6, atol=1e-6)
    assert layer.bias.grad.tolist() == [2.0] * 3


def test_a_layer_of_the_constructor_is_zero_until_something_is_loaded() -> None:
    layer = WeightOnlyInt8Linear(5, 3, device="cpu", dtype=torch.bfloat16)
    assert (layer.weight.dtype, layer.weight.shape) == (torch.int8, (3, 5))
    assert layer.scales.tolist() == [1.0] * 3
    assert layer.scales.dtype == torch.bfloat16
    assert layer(torch.ones(5)).tolist() == [0.0] * 3
    layer.weight, layer.scales = torch.ones(3, 5, dtype=torch.int8), torch.tensor([1.0, 2.0, 3.0])
    assert layer(torch.ones(5)).tolist() == [5.0, 10.0, 15.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scales_have_the_models_dtype_and_not_always_bf16(dtype: torch.dtype) -> None:
    model = nn.Linear(64, 48).to(dtype)
    codes, scales, _ = dynamically_quantize_per_channel(model.weight.detach().float(), -128, 127, torch.int8)
    layer = converted(model)
    assert torch.equal(layer.weight, codes)
    assert torch.equal(layer.scales, scales.to(dtype))
    assert layer.scales.dtype == dtype


def test_scales_are_rounded_with_the_model() -> None:
    layer = converted(nn.Linear(64, 48))
    scales = layer.scales.clone()
    layer.bfloat16()
    assert torch.equal(layer.scales, scales.bfloat16())
    layer.float()
    assert torch.equal(layer.scales, scales.bfloat16().float())


# -- state dicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_keys_shapes_and_dtypes_are_the_originals(bias: bool) -> None:
    model = nn.Sequential(nn.Linear(6, 4, bias=bias), nn.ReLU(), nn.Linear(4, 2)).bfloat16()
    state = WeightOnlyInt8QuantHandler(model).create_quantized_state_dict()
    assert set(state) == set(model.state_dict()) | {"0.scales", "2.scales"}
    assert (state["0.weight"].dtype, state["0.weight"].shape) == (torch.int8, (4, 6))
    assert (state["0.scales"].dtype, state["0.scales"].shape) == (torch.bfloat16, (4,))
    assert state["0.weight"].is_contiguous()
    assert isinstance(model[0], nn.Linear)
    runtime = converted(model)
    assert set(runtime.state_dict()) == set(state)
    assert all(torch.equal(value, state[key]) for key, value in runtime.state_dict().items())


def test_a_checkpoint_of_the_originals_making_loads() -> None:
    # As written there: codes, scales in bf16, no bias where there was none.
    codes = torch.randint(-128, 128, (33, 70), dtype=torch.int8)
    scales = (torch.rand(33) / 100).bfloat16()
    file = io.BytesIO()
    torch.save({"0.weight": codes, "0.scales": scales}, file)
    file.seek(0)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(70, 33, bias=False))
    model = WeightOnlyInt8QuantHandler(model).convert_for_runtime()
    model.load_state_dict(torch.load(file), assign=True)
    assert torch.equal(model[0].weight, codes)
    assert torch.equal(model[0].scales, scales)
    x = torch.randn(2, 70)
    assert_product(model(x), x, model[0])


def test_a_layer_of_the_constructor_loads_a_checkpoint_without_a_bias() -> None:
    # The original's constructor takes bias=True and has none; a converted Linear with a bias wants it loaded.
    state = {"weight": torch.ones(3, 5, dtype=torch.int8), "scales": torch.ones(3)}
    layer = WeightOnlyInt8Linear(5, 3)
    layer.load_state_dict(state)
    assert layer(torch.ones(5)).tolist() == [5.0] * 3
    with pytest.raises(RuntimeError, match=r'Missing key.*"bias"'):
        converted(nn.Linear(5, 3)).load_state_dict(state)


def test_loading_what_was_saved_gives_the_same_bits() -> None:
    model = nn.Sequential(nn.Linear(70, 33), nn.Linear(33, 7)).bfloat16()
    runtime = converted(model)
    other = converted(nn.Sequential(nn.Linear(70, 33), nn.Linear(33, 7)).bfloat16())
    other.load_state_dict(runtime.state_dict())
    x = torch.randn(3, 70, dtype=torch.bfloat16)
    assert torch.equal(other(x), runtime(x))
    assert torch.equal(pickle.loads(pickle.dumps(runtime))(x), runtime(x))
    assert torch.equal(copy.deepcopy(runtime)(x), runtime(x))


def test_a_float_weight_is_quantized_as_it_is_loaded() -> None:
    model = nn.Linear(70, 33)
    runtime = converted(nn.Linear(70, 33))
    runtime.load_state_dict(model.state_dict())
    assert torch.equal(runtime.weight, converted(model).weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(3, 4, dtype=torch.int8)}, r"weight: expected int8.*\[3, 5\], got int8 \[3, 4\]"),
        ({"weight": torch.zeros(3, 5, dtype=torch.uint8)}, r"weight: expected int8.*got uint8 \[3, 5\]"),
        ({"scales": torch.zeros(4)}, r"scales: expected floats of shape \[3\], got float32 \[4\]"),
        ({"scales": None}, r'Missing key\(s\) in state_dict: "scales"'),
        ({"weight": None}, r'Missing key\(s\) in state_dict: "weight"'),
        ({"zeros": torch.zeros(3)}, r'Unexpected key\(s\) in state_dict: "zeros"'),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused(change: dict[str, Tensor | None], message: str) -> None:
    layer = converted(nn.Linear(5, 3))
    before = layer.weight.clone()
    state = {key: value for key, value in {**layer.state_dict(), **change}.items() if value is not None}
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state)
    assert torch.equal(layer.weight, before)


# -- models -----------------------------------------------------------------------------------------------------------


def test_a_root_linear_becomes_int8_and_has_no_key_that_begins_with_a_dot() -> None:
    layer = nn.Linear(6, 4)
    assert set(WeightOnlyInt8QuantHandler(layer).create_quantized_state_dict()) == {"weight", "scales", "bias"}
    assert replace_linear_weight_only_int8_per_channel(layer) is None
    assert isinstance(layer, WeightOnlyInt8Linear)


@pytest.mark.filterwarnings("ignore:for .*copying from a non-meta")  # torch's own, of the norms
def test_a_meta_model_allocates_nothing_and_loads_with_assign() -> None:
    model = Tied().eval()
    state = WeightOnlyInt8QuantHandler(model).create_quantized_state_dict()
    with torch.device("meta"):
        empty = Tied().eval()
    empty.head.weight = empty.embedding.weight  # factories on meta give tensors of their own
    runtime = WeightOnlyInt8QuantHandler(empty).convert_for_runtime()
    assert all(tensor.is_meta for tensor in (*runtime.parameters(), *runtime.buffers()))
    with pytest.raises(RuntimeError, match=r"meta device.*assign=True"):
        runtime.load_state_dict(state)
    runtime.load_state_dict(state, assign=True)
    tokens = torch.randint(50, (2, 7))
    assert torch.equal(runtime(tokens), converted(model)(tokens))
    with pytest.raises(QuantizeError, match=r"mod: weight is on the meta device.*Load it first"):
        WeightOnlyInt8QuantHandler(nn.Linear(3, 2, device="meta")).create_quantized_state_dict()


def test_tied_weights_stay_tied_through_conversion_moves_loading_and_back() -> None:
    model = Tied().eval()
    state = WeightOnlyInt8QuantHandler(model).create_quantized_state_dict()
    assert state["embedding.weight"].dtype == torch.float32  # as the original writes it
    runtime = converted(model)
    assert isinstance(runtime.embedding, WeightOnlyInt8Embedding)
    for change in (lambda: None, runtime.double, lambda: runtime.load_state_dict(state, assign=True), runtime.float):
        change()
        assert runtime.head.weight.data_ptr() == runtime.embedding.weight.data_ptr()
    tokens = torch.tensor([[3, 7]])
    expected = runtime.head.weight[tokens] * runtime.head.scales[tokens].unsqueeze(-1)
    assert torch.equal(runtime.embedding(tokens), expected)
    runtime.load_state_dict(runtime.state_dict())
    nc.dequantize_(runtime)
    assert runtime.head.weight is runtime.embedding.weight
    assert type(runtime.embedding) is nn.Embedding


def test_two_linears_with_one_weight_share_their_rows() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    runtime = converted(model)
    runtime[0].weight.fill_(1)
    assert bool((runtime[1].weight == 1).all())


def test_multihead_attention_works_and_its_fast_path_is_kept_off() -> None:
    model = Tied().eval()
    tokens = torch.randint(50, (2, 7))
    runtime = converted(model)
    assert isinstance(runtime.layer.self_attn.out_proj, WeightOnlyInt8Linear)
    # The same model with every int8 weight as floats: what differs are fp32 roundings, amplified by two norms.
    expected = nc.dequantize_(copy.deepcopy(runtime))(tokens)
    with torch.inference_mode():
        assert torch.allclose(runtime(tokens), expected, rtol=1e-4, atol=1e-4)
    assert type(nc.dequantize_(runtime).layer.self_attn) is nn.MultiheadAttention


def test_layers_can_be_skipped_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    runtime = converted(model, skip=["^1$"])
    assert isinstance(runtime[0], WeightOnlyInt8Linear)
    assert type(runtime[1]) is nn.Linear
    with pytest.raises(SpecError, match=r"skip: 'gate' matches no Linear. Some that there are: 0, 1"):
        converted(model, skip=["gate"])


def test_a_layer_that_does_more_than_a_linear_is_refused_until_it_is_skipped() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = nn.Sequential(Scaled(4, 4), nn.Linear(4, 4))
    with pytest.raises(QuantizeError, match=r"module: 0 cannot be made int8: Scaled changes.*skip=\['0'\]"):
        replace_linear_weight_only_int8_per_channel(model)
    assert type(model[1]) is nn.Linear
    replace_linear_weight_only_int8_per_channel(model, skip=["0"])
    assert isinstance(model[1], WeightOnlyInt8Linear)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"x: expected \[out, in\].*got \[3\]"):
        dynamically_quantize_per_channel(torch.ones(3), -128, 127, torch.int8)
    with pytest.raises(DtypeError, match="codecs take float32"):
        dynamically_quantize_per_channel(torch.ones(3, 3, dtype=torch.int32), -128, 127, torch.int8)
    with pytest.raises(ShapeError, match=r"in_features=5, got \[4\]"):
        WeightOnlyInt8Linear(5, 3)(torch.ones(4))
    with pytest.raises(DtypeError, match=r"indices in int32 or int64, got float32"):
        converted(Tied()).embedding(torch.ones(1))


# -- parts of a layer, as gpt-fast's tp.py cuts them ------------------------------------------------------------------


def test_parts_of_layers_are_assigned_as_tensor_parallelism_does_and_add_up() -> None:
    whole = WeightOnlyInt8Linear(16, 12, bias=False)
    x = torch.randn(3, 16)
    codes, scales, _ = dynamically_quantize_per_channel(torch.randn(12, 16), -128, 127, torch.int8)
    whole.load_state_dict({"weight": codes, "scales": scales})
    outputs, sums = [], []
    for rank in range(2):
        by_row, by_column = copy.deepcopy(whole), copy.deepcopy(whole)
        by_row.scales = by_row.scales.tensor_split(2)[rank]  # the order of tp.py: scales, weight, features
        assert len(by_row.scales) == 6
        with pytest.raises(ShapeError, match="scales: 6 of them were assigned, and weight has 12 rows"):
            by_row(x)
        with pytest.raises(ShapeError, match="scales: 6 of them"):
            by_row.state_dict()
        by_row.weight = nn.Parameter(by_row.weight.tensor_split(2)[rank], requires_grad=False)
        by_row.out_features //= 2
        outputs.append(by_row(x))
        assert sorted(by_row.state_dict()) == ["scales", "weight"]
        by_column.weight = nn.Parameter(by_column.weight.tensor_split(2, 1)[rank], requires_grad=False)
        by_column.in_features //= 2
        sums.append(by_column(x.tensor_split(2, 1)[rank]))
    assert torch.equal(torch.cat(outputs, 1), whole(x))
    torch.testing.assert_close(sum(sums), whole(x), rtol=1e-5, atol=1e-5)


def test_assigning_what_cannot_be_a_weight_or_its_scales_is_refused_and_changes_nothing() -> None:
    layer = WeightOnlyInt8Linear(4, 6)
    layer.weight = torch.ones(6, 4, dtype=torch.int64)
    before = layer.state_dict()
    for name, value, error in [
        ("weight", torch.full((6, 4), 300), PayloadError),
        ("weight", torch.full((6, 4), -129), PayloadError),
        ("weight", torch.ones(6, 4), ShapeError),
        ("weight", torch.ones(5, 4, dtype=torch.int8), ShapeError),
        ("weight", torch.ones(3, 4, dtype=torch.int8), ShapeError),
        ("weight", torch.ones(24, dtype=torch.int8), ShapeError),
        ("weight", [[1]], ShapeError),
        ("scales", torch.ones(4), ShapeError),
        ("scales", torch.ones(12), ShapeError),
        ("scales", torch.ones(6, 1), ShapeError),
        ("scales", torch.ones(6, dtype=torch.int64), ShapeError),
        ("scales", torch.ones(0), ShapeError),
        ("scales", 1.0, ShapeError),
    ]:
        with pytest.raises(error, match=f"^{name}: "):
            setattr(layer, name, value)
        assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items()), (name, value)
    layer.scales = torch.ones(3)  # waits for its rows
    layer.scales = torch.full((6,), 2.0)  # or is given up
    assert layer(torch.ones(4)).tolist() == [8.0] * 6
