"""From a float model to one that trains with quantized weights, in place; and the optimizer's groups for it.

`prepare_qat_` decides first and changes then: which layers, on which grids, and where their clips start. All that is
wrong is raised before the first layer changes. It prepares the weights of Linear, Conv1d/2d/3d and Embedding, out of
the same survey as `quantize_`. Every other weight stays as it is, and is listed with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from narrowcast.codecs import Codec
from narrowcast.codecs.rules import CodecLike, Rules, compile_rules
from narrowcast.errors import QuantizeError, StateDictError
from narrowcast.nn.modules.fast_path import set_fast_path
from narrowcast.nn.noise import sqnr
from narrowcast.nn.qat.checks import check_normalize, check_start
from narrowcast.nn.qat.fake_quantize import FakeQuantize
from narrowcast.nn.qat.grids import stored_codec, trainable
from narrowcast.nn.qat.layers import TRAINED, Trained, train
from narrowcast.nn.quantize import as_module, choose_codec, count_rules
from narrowcast.nn.report import Entry, Report
from narrowcast.nn.state import check_before_loading, loading_strictly
from narrowcast.nn.survey import Skip, Slot, Weight, direct_read, survey


class Options(NamedTuple):
    """The options that are the same for every layer."""

    per_channel: bool
    normalize: str | None
    start: str
    learn: bool


class Codecs(NamedTuple):
    """What weights, inputs, and both of the first and the last layer get where no rule decides."""

    weights: CodecLike
    activations: CodecLike | None
    first_last: CodecLike | None


class Choice(NamedTuple):
    """One weight, and the codecs of it and of its layer's inputs."""

    weight: Weight
    codec: Codec
    activations: Codec | None


Decision = tuple[list[Choice], list[Skip], list[str]]
RuleMap = Mapping[str, CodecLike | bool | None] | None


def prepare_qat_(
    model: nn.Module,
    weights: CodecLike = "apot4",
    activations: CodecLike | None = None,
    *,
    rules: RuleMap = None,
    input_rules: RuleMap = None,
    first_last: CodecLike | None = "int8",
    per_channel: bool = True,
    normalize: str | None = "through",
    start: str = "mse",
    learn: bool = True,
) -> Report:
    """Let the layers of a model train with quantized weights, and inputs, in place; says which, and what it skipped.

    `rules` maps regular expressions, searched for in the names of modules, to the codecs of weights, or to None for
    layers that are to stay as they are; `input_rules` likewise to the codecs of inputs, or to None for inputs that
    stay floats. The first and the last layer get `first_last`, weights and inputs, unless a
    rule decides or it is None; a model of one layer has no first and last. `normalize` (see FakeQuantize) holds for
    weights of fewer than 8 bits but those of embeddings. Weights have a clip per output channel, or with
    `per_channel=False` one; they start from the weights at once, inputs from the first batch or from `calibrate_`.
    """
    options = Options(per_channel, normalize, check_start(start), learn)
    check_normalize(normalize)
    if any(isinstance(module, Trained) for module in as_module(model).modules()):
        raise QuantizeError(
            "model: it is prepared already. Call convert_(model) once it is trained, or start from the float model. "
            "The model was left as it was."
        )
    choices, skips, unused = _decide(model, Codecs(weights, activations, first_last), rules, input_rules)
    quantizers = [_weight_quantizer(choice, options) for choice in choices]
    entries = [_change(*pair, options) for pair in zip(choices, quantizers, strict=True)]
    set_fast_path(model)
    check_before_loading(model, check_state_dict, bool(entries))
    return Report(entries, skips, unused)


def parameter_groups(
    model: nn.Module, *, alpha_lr: float | None = None, alpha_weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Two groups for an optimizer: everything but the clips, and the clips with a rate and decay of their own.

    Weight decay would draw clips to zero, so they get none unless asked for. Without `alpha_lr` they learn as fast as
    everything else.
    """
    clips = {
        id(module.alpha): module.alpha for module in as_module(model).modules() if isinstance(module, FakeQuantize)
    }
    if not clips:
        raise QuantizeError(
            "model: it has no clips that are learned. Call prepare_qat_(model) first, and make the optimizer then."
        )
    others = [p for p in model.parameters() if id(p) not in clips and p.requires_grad]
    group: dict[str, Any] = {"params": [p for p in clips.values() if p.requires_grad]}
    group["weight_decay"] = alpha_weight_decay
    if alpha_lr is not None:
        group["lr"] = alpha_lr
    return [{"params": others}, group]


# -- decide --------------------------------------------------------------------------------------------------------


def _decide(model: nn.Module, codecs: Codecs, rules: RuleMap, input_rules: RuleMap) -> Decision:
    inner, outer = _both(rules, trainable(codecs.weights), codecs.first_last)
    inputs = None if codecs.activations is None else trainable(codecs.activations)
    inner_inputs, outer_inputs = _both(input_rules, inputs, None if inputs is None else codecs.first_last)
    fitting, skips = _trainable_weights(model)
    count_rules(inner, skips)
    choices = []
    for place, weight in enumerate(fitting):
        outermost = len(fitting) > 1 and place in (0, len(fitting) - 1)
        codec = choose_codec(weight, outer if outermost else inner)
        if isinstance(codec, Codec):
            names = [name for slot in weight.slots for name in slot.names]
            activations = (outer_inputs if outermost else inner_inputs).codec_for(*names)
            choices.append(Choice(weight, trainable(codec), None if activations is None else trainable(activations)))
        else:
            skips += codec
    both = ((inner, outer), (inner_inputs, outer_inputs))
    return choices, skips, [pattern for one, other in both for pattern in one.unused if pattern in other.unused]


def _both(rules: RuleMap, codec: Codec | None, first_last: CodecLike | None) -> tuple[Rules, Rules]:
    """Rules for the layers within, and for the first and the last one."""
    inner = compile_rules(rules, codec)
    return inner, inner if first_last is None else compile_rules(rules, trainable(first_last))


def _trainable_weights(model: nn.Module) -> tuple[list[Weight], list[Skip]]:
    """The weights of a model that can be trained quantized, and those that cannot."""
    weights, skips = survey(model)
    fitting, skips = [], list(skips)
    attended = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    for weight in weights:
        why = next((reason for slot in weight.slots if (reason := _unfit(slot, attended))), "")
        skips += [Skip(slot.key, why) for slot in weight.slots if why]
        if not why:
            fitting.append(weight)
    return fitting, skips


def _unfit(slot: Slot, attended: set[int]) -> str:
    """Why a weight that can be encoded cannot be trained quantized."""
    if id(slot.module) in attended:
        return direct_read("nn.MultiheadAttention")
    if _base(slot.module) is None or slot.transposed:
        return f"{type(slot.module).__name__} is not trained quantized; Linear, Conv1d/2d/3d and Embedding are"
    return ""


def _base(module: nn.Module) -> type[nn.Module] | None:
    return next((base for base in TRAINED if isinstance(module, base)), None)


# -- change --------------------------------------------------------------------------------------------------------


def _weight_quantizer(choice: Choice, options: Options) -> FakeQuantize:
    """The quantizer of a weight, started from it."""
    embedded = any(isinstance(slot.module, nn.Embedding) for slot in choice.weight.slots)
    weight = choice.weight.slots[0].float_weight()
    quantizer = FakeQuantize(
        choice.codec,
        0 if options.per_channel else None,
        options.learn,
        channels=weight.shape[0],
        signed=True,
        start=options.start,
        normalize=None if embedded or choice.codec.bits >= 8 else options.normalize,
        device=weight.device,
    )
    if weight.device.type != "meta":
        try:
            quantizer.start_from(weight)
        except QuantizeError as error:
            raise QuantizeError(f"{choice.weight.slots[0].key}: {error} The model was left as it was.") from error
    return quantizer


def _change(choice: Choice, quantizer: FakeQuantize, options: Options) -> Entry:
    """Make the layers of a weight trained ones."""
    entry = _entry(choice, quantizer)
    for slot in choice.weight.slots:
        base = _base(slot.module)
        assert base is not None
        inputs = None
        if choice.activations is not None and base is not nn.Embedding:
            device = slot.float_weight().device
            inputs = FakeQuantize(
                choice.activations, None, options.learn, start=options.start, batch_axis=0, device=device
            ).train(slot.module.training)
        train(slot.module, TRAINED[base], quantizer.train(slot.module.training), inputs)
    return entry


@torch.no_grad()
def _entry(choice: Choice, quantizer: FakeQuantize) -> Entry:
    slot = choice.weight.slots[0]
    weight = slot.float_weight().detach()
    stored = stored_codec(choice.codec)
    return Entry(
        name=slot.key,
        kind=type(slot.module).__name__,
        shape=tuple(weight.shape),
        codec=stored.spec,
        bytes_before=weight.numel() * weight.element_size(),
        bytes_after=weight.shape[0] * stored.row_bytes(math.prod(weight.shape[1:])),
        sqnr=None if weight.device.type == "meta" else sqnr(quantizer.target(weight), quantizer(weight)),
        tied=tuple(choice.weight.names()[1:]),
    )


# -- state dicts -----------------------------------------------------------------------------------------------------


def check_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], prefix: str, metadata: Any, strict: bool, *rest: Any
) -> None:
    """Refuse a state dict without clips, or of another grid."""
    strict = strict and loading_strictly()
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, FakeQuantize):
            continue
        start = f"{prefix}{name}."
        if strict and start + "alpha" not in state_dict:
            raise StateDictError(
                f"state_dict: it has no {start + 'alpha'!r}. It comes from the model before prepare_qat_, or from one "
                "prepared differently: load it into the float model and call prepare_qat_ then, or prepare with the "
                "arguments it was saved with. With strict=False its weights are loaded, and clips start from them. "
                "Nothing was loaded."
            )
        module.check_state(state_dict, start)
