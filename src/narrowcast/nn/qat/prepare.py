"""From a float model to one that trains with quantized weights, in place; and the optimizer's groups for it.

`prepare_qat_` decides first and changes then: which layers, on which grids, and where their clips start. Whatever is
wrong is raised before the first layer has changed. What it takes are the weights of Linear, Conv1d/2d/3d and Embedding,
by the same survey as `quantize_`; every other weight is left, and listed with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowcast.codecs import Codec
from narrowcast.codecs.rules import CodecLike, compile_rules
from narrowcast.errors import QuantizeError, SpecError, StateDictError
from narrowcast.nn.modules.fast_path import settle
from narrowcast.nn.qat.clips import check_start
from narrowcast.nn.qat.fake_quantize import FakeQuantize
from narrowcast.nn.qat.grids import stored_codec, trainable
from narrowcast.nn.qat.layers import TRAINED, Trained, train
from narrowcast.nn.quantize import as_module, same_codec, why_left
from narrowcast.nn.report import Entry, Report
from narrowcast.nn.survey import Skip, Slot, Weight, survey


class Options(NamedTuple):
    """What holds for every layer."""

    per_channel: bool
    normalize: str | None
    start: str
    learn: bool


class Choice(NamedTuple):
    """One weight, and the codecs of it and of its layer's inputs."""

    weight: Weight
    codec: Codec
    activations: Codec | None


def prepare_qat_(
    model: nn.Module,
    weights: CodecLike = "apot4",
    activations: CodecLike | None = None,
    *,
    rules: Mapping[str, CodecLike | bool | None] | None = None,
    first_last: CodecLike | None = "int8",
    per_channel: bool = True,
    normalize: str | None = "through",
    start: str = "mse",
    learn: bool = True,
) -> Report:
    """Let the layers of a model train with quantized weights, and inputs, in place; says which, and what it left.

    `rules` maps regular expressions, searched for in the names of modules, to the codecs of weights, or to None for
    layers that are to stay as they are. The first and the last layer get `first_last`, weights and inputs, unless a
    rule decides or it is None; a model of one layer has no first and last. `normalize` (see FakeQuantize) holds for
    weights of fewer than 8 bits but those of embeddings. Weights have a clip per output channel, or with
    `per_channel=False` one; they start from the weights at once, inputs from the first batch or from `calibrate_`.
    """
    options = Options(per_channel, normalize, check_start(start), learn)
    if normalize not in (None, "through", "detached"):
        raise SpecError(f'normalize={normalize!r}: expected None, "through" or "detached".')
    if any(isinstance(module, Trained) for module in as_module(model).modules()):
        raise QuantizeError(
            "model: it is prepared already. Call convert_(model) once it is trained, or start from the float model. "
            "The model was left as it was."
        )
    choices, skips, unused = _decide(model, weights, activations, rules, first_last)
    made = [(choice, _weight_quantizer(choice, options)) for choice in choices]
    entries = [_change(choice, quantizer, options) for choice, quantizer in made]
    settle(model)
    if entries:
        model.register_load_state_dict_pre_hook(check_state_dict)  # type: ignore[no-untyped-call]
    return Report(entries, skips, unused)


def parameter_groups(
    model: nn.Module, *, alpha_lr: float | None = None, alpha_weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Two groups for an optimizer: everything but the clips, and the clips with a rate and decay of their own.

    Decay draws clips to zero, where there is nothing: none, unless asked for. Without `alpha_lr` they learn as fast
    as everything else.
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


def _decide(
    model: nn.Module,
    weights: CodecLike,
    activations: CodecLike | None,
    rules: Mapping[str, CodecLike | bool | None] | None,
    first_last: CodecLike | None,
) -> tuple[list[Choice], list[Skip], list[str]]:
    inner = compile_rules(rules, trainable(weights))
    outer = inner if first_last is None else compile_rules(rules, trainable(first_last))
    inputs = None if activations is None else trainable(activations)
    outer_inputs = inputs if first_last is None or inputs is None else trainable(first_last)
    found = survey(model)
    skips = list(found.skips)
    for skip in skips:  # a rule that names what cannot be trained is no misspelt one
        inner.codec_for(skip.name.rpartition(".")[0], skip.name)
    attended = {id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    fitting = []
    for weight in found.weights:
        why = next((reason for slot in weight.slots if (reason := _unfit(slot, attended))), "")
        skips += [Skip(slot.key, why) for slot in weight.slots if why]
        if not why:
            fitting.append(weight)
    choices = []
    for place, weight in enumerate(fitting):
        outermost = len(fitting) > 1 and place in (0, len(fitting) - 1)
        chosen = outer if outermost else inner
        codecs = {slot.key: chosen.codec_for(*slot.known_as()) for slot in weight.slots}
        left = [key for key, codec in codecs.items() if codec is None]
        if left:
            skips += [Skip(key, why_left(key, left, chosen)) for key in codecs]
            continue
        choices.append(Choice(weight, trainable(same_codec(codecs)), outer_inputs if outermost else inputs))
    unused = [pattern for pattern in inner.unused if pattern in outer.unused]
    return choices, skips, unused


def _unfit(slot: Slot, attended: set[int]) -> str:
    """Why a weight that can be encoded cannot be trained quantized."""
    if id(slot.module) in attended:
        return "nn.MultiheadAttention reads it past its module"
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
    made = FakeQuantize(
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
            made.start_from(weight)
        except QuantizeError as error:
            raise QuantizeError(f"{choice.weight.slots[0].key}: {error} The model was left as it was.") from error
    return made


def _change(choice: Choice, quantizer: FakeQuantize, options: Options) -> Entry:
    entry = _entry(choice, quantizer)
    for slot in choice.weight.slots:
        base = _base(slot.module)
        assert base is not None
        inputs = None
        if choice.activations is not None and base is not nn.Embedding:
            inputs = FakeQuantize(
                choice.activations,
                None,
                options.learn,
                start=options.start,
                batch_axis=0,
                device=slot.float_weight().device,
            )
        quantizer.train(slot.module.training)
        if inputs is not None:
            inputs.train(slot.module.training)
        train(slot.module, TRAINED[base], quantizer, inputs)
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
        sqnr=None if weight.device.type == "meta" else signal_to_noise(weight, quantizer(weight)),
        tied=tuple(choice.weight.names()[1:]),
    )


def signal_to_noise(exact: Tensor, rounded: Tensor) -> float:
    """10 log10 of the energy of a tensor over that of its error."""
    signal = float(torch.linalg.vector_norm(exact.double())) ** 2
    noise = float(torch.linalg.vector_norm(exact.double() - rounded.double())) ** 2
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


# -- state dicts -----------------------------------------------------------------------------------------------------


def check_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], prefix: str, metadata: Any, strict: bool, *rest: Any
) -> None:
    """Before any module of the model is loaded, so that a state dict of another grid changes nothing."""
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, FakeQuantize):
            continue
        start = f"{prefix}{name}."
        if strict and start + "alpha" not in state_dict:
            raise StateDictError(
                f"state_dict: it has no {start + 'alpha'!r}. It comes from the model before prepare_qat_, or from one "
                "prepared differently: load it into the float model and call prepare_qat_ then, or prepare with the "
                "arguments it was saved with. Nothing was loaded."
            )
        module.check_state(state_dict, start)
