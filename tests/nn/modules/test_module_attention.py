"""nc.nn.MultiheadAttention: every option of torch's, and torch's fast path kept away from encoded rows."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

import narrowcast as nc
from cases import same_bits
from narrowcast.errors import DtypeError, ShapeError

E, H, L, S, N = 32, 4, 5, 6, 3

# Both modules compute in fp32 from the same decoded weights, in other orders. Projections of E = 32 products of size
# about 1, scores of head_dim = 8, a softmax over S + 2 <= 8 and sums of these: fewer than 128 roundings of 2**-24 in a
# row of terms that are below 4 in magnitude, so 128 * 2**-24 * 4 = 3.1e-5 is never reached.
TOLERANCE = 128 * 2.0**-24 * 4


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def pair(spec: str = "int8", **options: object) -> tuple[nn.Module, nn.Module]:
    """An encoded attention, and torch's with the decoded weights."""
    module = nn.MultiheadAttention(E, H, **options)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    nc.quantize_(module, spec)
    assert type(module) is nc.nn.MultiheadAttention
    reference = nc.dequantize_(copy.deepcopy(module))
    assert type(reference) is nn.MultiheadAttention
    return module, reference


def same(ours: tuple[Tensor, Tensor | None], theirs: tuple[Tensor, Tensor | None]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert mine.shape == other.shape
            assert torch.equal(mine.isnan(), other.isnan())
            assert float((mine - other).detach().nan_to_num().abs().max()) <= TOLERANCE


def inputs(batch_first: bool, batched: bool = True, kdim: int = E, vdim: int = E) -> tuple[Tensor, Tensor, Tensor]:
    def one(length: int, width: int) -> Tensor:
        x = torch.randn(N, length, width) if batched else torch.randn(length, width)
        return x.transpose(0, 1) if batched and not batch_first else x

    return one(L, E), one(S, kdim), one(S, vdim)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
@pytest.mark.parametrize(("batch_first", "batched"), list(itertools.product([False, True], [False, True])))
@pytest.mark.parametrize(("need_weights", "average"), [(False, True), (True, True), (True, False)])
def test_options_and_shapes_mean_what_torch_says(
    options: dict[str, bool], batch_first: bool, batched: bool, need_weights: bool, average: bool
) -> None:
    module, reference = pair(batch_first=batch_first, **options)
    given = inputs(batch_first, batched)
    more = {"need_weights": need_weights, "average_attn_weights": average}
    same(module(*given, **more), reference(*given, **more))


def test_keys_and_values_of_other_widths() -> None:
    module, reference = pair(kdim=12, vdim=20, batch_first=True, add_bias_kv=True)
    assert set(nc.nn.encodings(module)) == {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"}
    given = inputs(True, kdim=12, vdim=20)
    same(module(*given), reference(*given))


def masks(kind: str, batched: bool) -> dict[str, Tensor]:
    attention, padding = torch.rand(L, S) < 0.3, torch.rand(N, S) < 0.3
    attention[:, 0] = padding[:, 0] = False  # some key stays in sight
    apart = (torch.rand(N * H, L, S) < 0.3).index_fill(2, torch.tensor([0]), False)
    return {
        "bool": {"attn_mask": attention},
        "float": {"attn_mask": torch.randn(L, S)},
        "of every head": {"attn_mask": apart},
        "padding": {"key_padding_mask": padding if batched else padding[0]},
        "float padding": {"key_padding_mask": torch.randn(N, S) if batched else torch.randn(S)},
        "both": {"attn_mask": attention, "key_padding_mask": padding if batched else padding[0]},
    }[kind]


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float", "of every head", "padding", "float padding", "both"])
def test_masks_mean_what_torch_says(kind: str, batched: bool, need_weights: bool, extended: bool) -> None:
    if kind == "of every head" and not batched:
        pytest.skip("a mask for every head of a batch needs a batch")
    module, reference = pair(add_bias_kv=extended, add_zero_attn=extended)
    given, more = inputs(False, batched), masks(kind, batched)
    same(module(*given, need_weights=need_weights, **more), reference(*given, need_weights=need_weights, **more))


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_the_causal_hint_means_what_torch_says(need_weights: bool, padded: bool) -> None:
    module, reference = pair(batch_first=True)
    x = torch.randn(N, L, E)
    more = {"attn_mask": nn.Transformer.generate_square_subsequent_mask(L), "is_causal": True}
    if padded:
        more["key_padding_mask"] = torch.tensor([[False] * 4 + [True]] * N).float() * -1e9
    reference.train()  # keeps torch off its fast path, which has a meaning of its own for masks
    same(module(x, x, x, need_weights=need_weights, **more), reference(x, x, x, need_weights=need_weights, **more))


def test_self_attention_in_eval_is_torchs_fast_path_but_for_roundings() -> None:
    module, reference = pair(batch_first=True)
    x = torch.randn(N, L, E)
    with torch.no_grad():
        same(module.eval()(x, x, x), reference.eval()(x, x, x))


def test_dropout_is_applied_in_training_only() -> None:
    module, reference = pair(dropout=0.5)
    given = inputs(False)
    for need_weights in (False, True):
        torch.manual_seed(1)
        first = module.train()(*given, need_weights=need_weights)[0]
        assert not torch.equal(first, module(*given, need_weights=need_weights)[0])
        same(module.eval()(*given), reference.eval()(*given))
    torch.manual_seed(1)
    ours = module.train()(*given)[1]
    torch.manual_seed(1)
    theirs = reference.train()(*given)[1]
    assert ours is not None
    assert theirs is not None
    assert torch.equal(ours == 0, theirs == 0)


def test_gradients_reach_inputs_and_biases() -> None:
    module, reference = pair(batch_first=True, add_bias_kv=True)
    grads = []
    for one in (module, reference):
        x = torch.linspace(-1, 1, N * L * E).view(N, L, E).requires_grad_()
        one(x, x, x)[0].square().sum().backward()
        grads.append([x.grad, one.in_proj_bias.grad, one.bias_k.grad, one.out_proj.bias.grad])
        one.zero_grad()
    for mine, other in zip(*grads, strict=True):
        # Sums over N * L = 15 outputs of E = 32 squares more than the forward: 512 further roundings of larger terms.
        assert float((mine - other).abs().max()) <= 16 * TOLERANCE * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_follows_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    module, reference = pair(batch_first=True)
    x = torch.randn(N, L, E, dtype=dtype)
    with torch.no_grad():
        mine, other = module.to(dtype)(x, x, x)[0], reference.to(dtype)(x, x, x)[0]
    assert mine.dtype == dtype
    # Four roundings to 16 bits (projection, score, weight, mix) of terms below 4, on either side.
    assert float((mine - other).float().abs().max()) <= 8 * 4 * torch.finfo(dtype).eps


def test_it_compiles_into_one_graph() -> None:
    module, _ = pair(batch_first=True)
    x = torch.randn(N, L, E)
    with torch.no_grad():
        assert same_bits(torch.compile(module, fullgraph=True, backend="aot_eager")(x, x, x)[0], module(x, x, x)[0])
    torch._dynamo.reset()


def test_what_rules_leave_alone_stays_float_and_right() -> None:
    for rules in ({"in_proj": None}, {"out_proj": None}):
        module = nn.MultiheadAttention(E, H, batch_first=True).eval()
        report = nc.quantize_(module, rules=rules)
        assert len(report.entries) == len(report.skips) == 1
        reference = nc.dequantize_(copy.deepcopy(module))
        x = torch.randn(N, L, E)
        with torch.no_grad():
            same(module(x, x, x), reference(x, x, x))


def test_from_float_and_dequantize_leave_what_they_are_given() -> None:
    floats = nn.MultiheadAttention(E, H, add_bias_kv=True)
    module = nc.nn.MultiheadAttention.from_float(floats, "int8")
    assert type(floats) is nn.MultiheadAttention
    assert isinstance(floats.out_proj, nn.Linear)
    assert set(nc.nn.encodings(module)) == {"in_proj_weight", "out_proj.weight"}
    assert module.bias_k is floats.bias_k
    again = module.dequantize()
    assert set(nc.nn.encodings(module)) == {"in_proj_weight", "out_proj.weight"}
    given = inputs(False)
    same(module(*given), again(*given))


def test_arguments_that_do_not_fit_are_refused() -> None:
    module, _ = pair(batch_first=True)
    x = torch.randn(N, L, E)
    with pytest.raises(ShapeError, match=r"is_causal=True: a hint that attn_mask is the causal mask.*Pass attn_mask="):
        module(x, x, x, is_causal=True)
    with pytest.raises(ShapeError, match=r"attn_mask: expected \[5, 5\], or one for every head"):
        module(x, x, x, attn_mask=torch.zeros(4, 5))
    with pytest.raises(ShapeError, match=r"key_padding_mask: expected \[3, 5\], got \[3, 4\]"):
        module(x, x, x, key_padding_mask=torch.zeros(3, 4))
    with pytest.raises(DtypeError, match="attn_mask: expected bool"):
        module(x, x, x, attn_mask=torch.zeros(5, 5, dtype=torch.int64))
    with pytest.raises(ShapeError, match="query, key, value: expected three tensors of 3 dimensions"):
        module(x, x, x[0])


# -- encoders ---------------------------------------------------------------------------------------------------------


def encoder(norm_first: bool = False, activation: str = "relu") -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(E, H, 48, batch_first=True, norm_first=norm_first, activation=activation)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()


PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])


@pytest.mark.parametrize("rules", [None, {"self_attn": None}, {"linear": None}, {r"^layers\.0": None}], ids=str)
@pytest.mark.parametrize("padding", [None, PADDING])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_an_encoder_in_eval_mode_computes_with_the_encoded_weights(rules, padding, activation: str) -> None:  # type: ignore[no-untyped-def]
    model = encoder(activation=activation)
    nc.quantize_(model, "int4", rules=rules)
    reference = nc.dequantize_(copy.deepcopy(model))
    x = torch.randn(N, L, E)
    with torch.no_grad():
        mine, other = (one(x, src_key_padding_mask=padding) for one in (model, reference))
    if padding is not None:  # torch's fast path leaves zeros where there is padding
        mine, other = (one.masked_fill(padding[:, :, None], 0) for one in (mine, other))
    # Two layers, normalized twice each: as above, with four times the terms.
    assert float((mine - other).abs().max()) <= 4 * TOLERANCE


def test_the_fast_path_is_back_once_the_model_is_dequantized() -> None:
    model = encoder()
    layer = model.layers[0]
    before = model.use_nested_tensor, layer.activation_relu_or_gelu
    assert before == (True, 1)
    nc.quantize_(model)
    assert (model.use_nested_tensor, layer.activation_relu_or_gelu) == (False, 0)
    nc.quantize_(model)  # a second time changes nothing, and forgets nothing
    nc.dequantize_(model)
    assert (model.use_nested_tensor, layer.activation_relu_or_gelu) == before


def test_an_attention_quantized_apart_from_its_layer_keeps_the_fast_path_off_by_itself() -> None:
    model = encoder()
    for layer in model.layers:
        nc.quantize_(layer.self_attn)
    reference = nc.dequantize_(copy.deepcopy(model))
    x = torch.randn(N, L, E)
    with torch.no_grad():
        assert float((model(x) - reference(x)).abs().max()) <= 4 * TOLERANCE
        with pytest.raises(ShapeError, match=r"nested.*unless quantize_ was called on it"):
            model(x, src_key_padding_mask=PADDING)


def test_a_whole_transformer_computes_with_the_encoded_weights() -> None:
    model = nn.Transformer(E, H, 1, 1, 48, batch_first=True).eval()
    assert len(nc.quantize_(model, "int8").entries) == 10
    reference = nc.dequantize_(copy.deepcopy(model))
    source, target = torch.randn(N, S, E), torch.randn(N, L, E)
    with torch.no_grad():
        assert float((model(source, target) - reference(source, target)).abs().max()) <= 4 * TOLERANCE


def test_an_attention_with_a_forward_of_its_own_is_left_alone_with_its_projection() -> None:
    class Mine(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, x, x)[0]

    model = nn.Sequential(Mine(E, H))
    report = nc.quantize_(model)
    assert report.entries == []
    assert report.skips == [
        ("0.in_proj_weight", "Mine changes torch.nn.MultiheadAttention (forward)"),
        ("0.out_proj.weight", "the parent module Mine reads `.weight` directly instead of calling the layer"),
    ]
