"""From a float model to encoded rows and back, in place.

`quantize_` decides first and changes then: the codec of every weight, what is left and why, whether rules and weights
are fit. Whatever is wrong is raised before the first module has changed. Then weights are encoded one at a time, and
each float weight is let go before the next is encoded, so that the most memory in use is that of the float model and
one layer's rows. A weight that several modules share is encoded once and stays shared.

Only weights change. Biases, norms, buffers, hooks, the mode and the device stay what and where they were.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.codecs import Codec
from narrowcast.codecs.payload import EncodedRows, encode_rows
from narrowcast.codecs.rules import CodecLike, Rules, compile_rules
from narrowcast.errors import QuantizeError
from narrowcast.nn.modules.base import Encoded, Held, as_parameter, become, check_rows, hold, restore
from narrowcast.nn.modules.fast_path import settle
from narrowcast.nn.report import Entry, Report
from narrowcast.nn.survey import Skip, Slot, Survey, Weight, survey

TILE = 1 << 18
"""Elements that are compared at a time to measure the noise: about what stays in a cache."""

SAFE = 1e-20, 1e30
"""Energies of weights whose squares are far from where fp32 underflows and overflows."""


def quantize_(
    model: nn.Module,
    codec: CodecLike | None = "int8",
    *,
    rules: Mapping[str, CodecLike | bool | None] | None = None,
    allow_nonfinite: bool = False,
) -> Report:
    """Encode the weights of a model, in place; says what it encoded, and what it left and why.

    `rules` maps regular expressions, searched for in the names of modules, to codecs, or to None for weights that are
    to stay as they are: the first that matches decides, and `codec` where none does. A weight that holds an infinity or
    a NaN is refused unless `allow_nonfinite`: its block, or its element with a plain cast, decodes to NaN.
    """
    as_module(model)
    chosen = compile_rules(rules, codec)
    found = survey(model)
    plan, skips = _decide(found, chosen)
    if not allow_nonfinite:
        _refuse_nonfinite([weight for weight, _ in plan])
    entries = [_encode(weight, codec) for weight, codec in plan]
    finish(model)
    return Report(entries, skips, chosen.unused)


def dequantize_(model: nn.Module) -> nn.Module:
    """Decode every encoded weight of a model, in place: the classes that were there before, with rounded weights."""
    decoded: dict[int, nn.Parameter] = {}
    for module in as_module(model).modules():
        if isinstance(module, Encoded):
            restore(module, decoded)
    finish(model)
    return model


def as_module(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise QuantizeError(
            f"model: expected a torch.nn.Module, got {type(model).__name__}. For a tensor there is narrowcast.encode; "
            "a state dict is quantized once it is in its model."
        )
    return model


# -- decide --------------------------------------------------------------------------------------------------------


def _decide(found: Survey, rules: Rules) -> tuple[list[tuple[Weight, Codec]], list[Skip]]:
    plan: list[tuple[Weight, Codec]] = []
    skips = list(found.skips)
    for skip in skips:  # a rule that names what cannot be encoded is no misspelt one
        rules.codec_for(skip.name.rpartition(".")[0], skip.name)
    for weight in found.weights:
        choices = {slot.key: rules.codec_for(*slot.known_as()) for slot in weight.slots}
        left = [key for key, codec in choices.items() if codec is None]
        if left:
            skips += [Skip(key, why_left(key, left, rules)) for key in choices]
            continue
        plan.append((weight, same_codec(choices)))
    return plan, skips


def why_left(key: str, left: list[str], rules: Rules) -> str:
    if key not in left:
        return f"tied to {left[0]}, which a rule leaves alone"
    return "no rule gives it a codec" if rules.default is None else "a rule leaves it alone"


def same_codec(choices: Mapping[str, Codec | None]) -> Codec:
    (first, codec), *others = choices.items()
    assert codec is not None
    for other, another in others:
        if another is not None and another != codec:
            raise QuantizeError(
                f"rules: {first} and {other} are one tied weight, which can have one codec, but rules give it "
                f"{codec.spec!r} and {another.spec!r}. Write a rule that matches both, for example "
                f"{{{'|'.join((first, other))!r}: {codec.spec!r}}}, or untie them first. The model was left as it was."
            )
    return codec


def _refuse_nonfinite(weights: list[Weight]) -> None:
    wrong = []
    for weight in weights:
        values = weight.slots[0].float_weight().detach()
        # One pass without a copy: the extremes of a tensor are finite if and only if all of it is.
        if values.device.type != "meta" and not all(extreme.isfinite() for extreme in torch.aminmax(values)):
            wrong.append(weight.slots[0].key)
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise QuantizeError(
            f"model: {', '.join(wrong[:3])}{more}: weights hold an infinity or a NaN, and a block that does decodes to "
            "NaN throughout. Usually a training run diverged, or fp16 overflowed. Mend the checkpoint, leave the "
            'weight as it is with rules={"its name": None}, or pass allow_nonfinite=True. The model was left as it was.'
        )


# -- change --------------------------------------------------------------------------------------------------------


def _encode(weight: Weight, codec: Codec) -> Entry:
    """Encode one weight, and put its rows wherever it was."""
    slot = weight.slots[0]
    floats = slot.float_weight().detach()
    floats = floats.t().contiguous() if slot.transposed else floats
    rows = encode_rows(floats, codec, lead=slot.lead)
    entry = Entry(
        name=slot.key,
        kind=_kind(slot.module).__name__,
        shape=tuple(rows.shape),
        codec=codec.spec,
        bytes_before=floats.numel() * floats.element_size(),
        bytes_after=rows.nbytes,
        sqnr=sqnr(floats, rows),
        tied=tuple(weight.names()[1:]),
    )
    place(weight, rows)
    return entry


def _kind(module: nn.Module) -> type[nn.Module]:
    """The float class: an attention or experts may be encoded already, but for this weight."""
    return module._float_class if isinstance(module, Encoded) else type(module)


def place(weight: Weight, rows: EncodedRows) -> None:
    """Put rows into every slot of a weight."""
    shared = as_parameter(rows.data)
    for slot in weight.slots:
        _place(slot, shared, rows)


def _place(slot: Slot, shared: nn.Parameter, rows: EncodedRows) -> None:
    trained = slot.float_weight().requires_grad
    become(slot.module, slot.target, rows.dtype)
    hold(slot.module, slot.parameter, shared, Held(rows.codec, rows.shape, slot.transposed, trained))


def sqnr(floats: Tensor, rows: EncodedRows) -> float | None:
    """10 log10 of the energy of a weight over that of its error."""
    if floats.device.type == "meta":
        return None
    signal, noise = _energies(floats, rows, torch.float32)
    if not (SAFE[0] < noise and signal < SAFE[1]):  # squares that fp32 has no room for, or no error at all
        signal, noise = _energies(floats, rows, torch.float64)
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _energies(floats: Tensor, rows: EncodedRows, sums: torch.dtype) -> tuple[float, float]:
    """The sums of squares of a weight and of its error, a few rows at a time, each row summed in the dtype `sums`."""
    wide = torch.float64 if floats.dtype == torch.float64 else torch.float32
    flat = rows.data.flatten(0, -2)
    matrix = floats.reshape(len(flat), rows.numel)
    step = max(1, TILE // rows.numel)
    totals = torch.zeros(2, dtype=torch.float64, device=floats.device)
    for first in range(0, len(flat), step):
        exact = matrix[first : first + step].to(wide)
        error = rows.codec.decode(flat[first : first + step], rows.numel, wide).sub_(exact)
        for place, values in enumerate((exact, error)):
            norms = torch.linalg.vector_norm(values, dim=1, dtype=torch.promote_types(sums, wide))
            totals[place] += norms.double().square().sum()
    signal, noise = totals.tolist()
    return signal, noise


def finish(model: nn.Module) -> None:
    """What follows every change of a model: torch's fast path, and the check of state dicts at its root."""
    settle(model)
    encoded = any(isinstance(module, Encoded) for module in model.modules())
    hooks = model._load_state_dict_pre_hooks
    present = [key for key, hook in hooks.items() if getattr(hook, "hook", None) is _check_state_dict]
    if encoded and not present:
        model.register_load_state_dict_pre_hook(_check_state_dict)  # type: ignore[no-untyped-call]
    if not encoded:
        for key in present:
            del hooks[key]


def _check_state_dict(model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    """Before any module of the model is loaded, so that a state dict of another layout changes nothing."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Encoded):
            check_rows(module, state_dict, f"{prefix}{name}." if name else prefix)
