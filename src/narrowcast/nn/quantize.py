"""From a float model to encoded rows and back, in place.

`quantize_` decides first and changes then. It chooses the codec of every weight, and lists what it skips and why. All
that is wrong with rules or weights is raised before the first module changes. Then weights are encoded one at a time,
and each float weight is freed before the next is encoded: the peak of memory is the float model and one layer's rows. A
weight that several modules share is encoded once and stays shared. A search runs random tokens through the model first.

With `data`, batches run through the model while it is rounded (nn/rounding/sequence.py). The float weights stay until
all is done, and the model is as it was if anything fails on the way, an interruption included.

Only weights change. Biases, norms, buffers, hooks, the mode and the device stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any

from torch import Tensor, nn

from narrowcast.codecs import Codec
from narrowcast.codecs.payload import EncodedRows
from narrowcast.codecs.rules import CodecLike, Rules, compile_rules
from narrowcast.codecs.sensitivity import is_finite
from narrowcast.errors import CalibrationError, QuantizeError
from narrowcast.nn.modules.base import (
    Conversion,
    Encoded,
    Held,
    as_parameter,
    become,
    check_rows,
    float_class_of,
    hold,
    restore,
)
from narrowcast.nn.modules.fast_path import set_fast_path
from narrowcast.nn.noise import sqnr_of_rows
from narrowcast.nn.report import Entry, Report
from narrowcast.nn.rounding import Rounding
from narrowcast.nn.rounding.batches import UNCHANGED, evaluating, read_batches
from narrowcast.nn.rounding.choice import Chosen, as_rounding, gain_of
from narrowcast.nn.rounding.losses import nearest_error, relative_error
from narrowcast.nn.rounding.moments import InputMoments
from narrowcast.nn.rounding.progress import shown
from narrowcast.nn.rounding.random_tokens import NOTHING, guess_inputs
from narrowcast.nn.rounding.recording import attention_calls_projections, why_no_moments
from narrowcast.nn.rounding.resume import Finished, digest_of_data, digest_of_model
from narrowcast.nn.rounding.sequence import round_in_order
from narrowcast.nn.rounding.undo import Snapshot
from narrowcast.nn.state import check_before_loading
from narrowcast.nn.survey import Skip, Weight, survey


def quantize_(
    model: nn.Module,
    codec: CodecLike | None = "int8",
    *,
    rules: Mapping[str, CodecLike | bool | None] | None = None,
    rounding: str | Rounding = "nearest",
    data: Iterable[Any] | None = None,
    checkpoint: str | PathLike[str] | None = None,
    allow_nonfinite: bool = False,
    progress: bool | None = None,
) -> Report:
    """Encode the weights of a model, in place; says what it encoded, and what it skipped and why.

    `rules` maps regular expressions, searched for in the names of modules, to codecs, or to None for weights that are
    to stay as they are: the first that matches decides, and `codec` where none does. `rounding` is "nearest", "search"
    (scales that lose least, no data) or "gptq" (needs `data`, an iterable of the model's inputs), or a `Rounding`; the
    rows have the same bytes whichever it is. With data, `checkpoint` names a folder that keeps rounded rows: the same
    call after an interruption goes on from there, to the same bytes. A weight that holds an infinity or a NaN is
    refused unless `allow_nonfinite`: its block, or its element with a plain cast, decodes to NaN. A progress bar is
    drawn on a terminal, unless `progress=False`.
    """
    as_module(model)
    chosen_rounding = as_rounding(rounding)
    compiled = compile_rules(rules, codec)
    weights, skips = survey(model)
    count_rules(compiled, skips)
    choices: list[tuple[Weight, Codec]] = []
    for weight in weights:
        chosen = choose_codec(weight, compiled)
        if isinstance(chosen, Codec):
            choices.append((weight, chosen))
        else:
            skips += chosen
    if not allow_nonfinite:
        _refuse_nonfinite(weight for weight, _ in choices)
    batches = None if data is None and not chosen_rounding.needs_data else read_batches(data)
    if batches is None:
        _refuse_checkpoint(checkpoint)
    with shown("rounding", len(choices), progress) as advance:
        if batches is None:
            guess = guess_inputs(model, choices) if chosen_rounding.searches else NOTHING
            entries = []
            for weight, codec in choices:
                entries.append(_encode(weight, codec, chosen_rounding, *guess.of(weight))[1])
                advance()
        else:
            entries = _encode_on_data(model, choices, chosen_rounding, batches, checkpoint, advance)
    finish(model)
    return Report(entries, skips, compiled.unused)


def _refuse_checkpoint(checkpoint: str | PathLike[str] | None) -> None:
    if checkpoint is not None:
        raise CalibrationError(
            f"checkpoint={str(checkpoint)!r}: keeps rows that were rounded on data, and there is none. Pass data, or "
            f"leave it out: without data weights are rounded in seconds. {UNCHANGED}"
        )


def dequantize_(model: nn.Module) -> nn.Module:
    """Decode every encoded weight of a model, in place: the float classes are back, with rounded weights."""
    decoded: dict[int, nn.Parameter] = {}
    for module in as_module(model).modules():
        if isinstance(module, Encoded):
            restore(module, decoded)
    finish(model)
    return model


Encoded.conversion = Conversion(quantize_, dequantize_)


def as_module(model: object) -> nn.Module:
    """`model`, refused if it is not a torch.nn.Module."""
    if not isinstance(model, nn.Module):
        raise QuantizeError(
            f"model: expected a torch.nn.Module, got {type(model).__name__}. For a tensor there is narrowcast.encode; "
            "a state dict is quantized once it is in its model."
        )
    return model


# -- decide --------------------------------------------------------------------------------------------------------


def count_rules(rules: Rules, skips: Iterable[Skip]) -> None:
    """Count the rules that match a skipped weight as used: they are not misspelt."""
    for skip in skips:
        rules.codec_for(skip.name.rpartition(".")[0], skip.name)


def choose_codec(weight: Weight, rules: Rules) -> Codec | list[Skip]:
    """The codec that rules give to a weight under all its names, or a skip for each name."""
    codecs = {slot.key: rules.codec_for(*slot.known_as()) for slot in weight.slots}
    without = [key for key, codec in codecs.items() if codec is None]
    if without:
        return [Skip(key, _why_skipped(key, without, rules)) for key in codecs]
    return _same_codec(codecs)


def _why_skipped(key: str, without: list[str], rules: Rules) -> str:
    if key not in without:
        return f"tied to {without[0]}, which a rule leaves alone"
    return "no rule gives it a codec" if rules.default is None else "a rule leaves it alone"


def _same_codec(codecs: Mapping[str, Codec | None]) -> Codec:
    (first, codec), *others = codecs.items()
    assert codec is not None
    for other, another in others:
        if another is not None and another != codec:
            raise QuantizeError(
                f"rules: {first} and {other} are one tied weight, which can have one codec, but rules give it "
                f"{codec.spec!r} and {another.spec!r}. Write a rule that matches both, for example "
                f"{{{'|'.join((first, other))!r}: {codec.spec!r}}}, or untie them first. The model was left as it was."
            )
    return codec


def _refuse_nonfinite(weights: Iterable[Weight]) -> None:
    wrong = []
    for weight in weights:
        values = weight.slots[0].float_weight().detach()
        if not values.is_meta and not is_finite(values):
            wrong.append(weight.slots[0].key)
    if wrong:
        others = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise QuantizeError(
            f"model: {', '.join(wrong[:3])}{others}: weights hold an infinity or a NaN, and a block that does decodes "
            "to NaN throughout. Usually a training run diverged, or fp16 overflowed. Mend the checkpoint, leave the "
            'weight as it is with rules={"its name": None}, or pass allow_nonfinite=True. The model was left as it was.'
        )


# -- change --------------------------------------------------------------------------------------------------------


def _encode_on_data(
    model: nn.Module,
    choices: list[tuple[Weight, Codec]],
    rounding: Chosen,
    batches: list[Any],
    checkpoint: str | PathLike[str] | None,
    advance: Callable[[], None],
) -> list[Entry]:
    """Encode all weights on the inputs that batches give them; the model is as it was if that fails."""
    weights = [weight for weight, _ in choices]
    codecs = {weight.slots[0].key: codec for weight, codec in choices}
    entries: dict[str, Entry] = {}
    finished = Finished(checkpoint, {} if checkpoint is None else _facts(model, codecs, rounding, batches))

    def encode(weight: Weight, moments: InputMoments | None, target: Tensor | None = None) -> None:
        key, floats = weight.slots[0].key, weight.slots[0].float_weight()
        if key in finished:
            entries[key] = _place_finished(weight, codecs[key], *finished.read(key))
        else:
            wanted = target if rounding.takes_data else None  # data changes no row of others
            rows, entries[key] = _encode(weight, codecs[key], rounding, moments, wanted, on_data=True)
            finished.keep(key, rows.data, entries[key]._asdict())
        finished.move_out(floats)
        advance()

    snapshot = Snapshot(model)
    try:
        with evaluating(model), attention_calls_projections(weights):
            set_fast_path(model)
            round_in_order(model, weights, batches, encode, finished)
    except BaseException:
        snapshot.restore()
        finished.move_back()
        raise
    return [entries[weight.slots[0].key] for weight in weights]


def _encode(
    weight: Weight,
    codec: Codec,
    rounding: Chosen,
    moments: InputMoments | None,
    target: Tensor | None = None,
    reason: str = "",
    *,
    on_data: bool = False,
) -> tuple[EncodedRows, Entry]:
    """Encode one weight, or what it is to be rounded to, and put its rows into every module that holds it."""
    slot = weight.slots[0]
    floats = slot.float_weight().detach()
    floats = floats.t().contiguous() if slot.transposed else floats
    wanted = floats if target is None else target.to(floats.dtype)
    rows, name, note = rounding.rows(wanted, codec, slot.lead, moments, why_no_moments(weight), gain := gain_of(weight))
    compared = on_data or name != "nearest"
    entry = Entry(
        name=slot.key,
        kind=float_class_of(slot.module).__name__,  # an attention may be encoded already, but for this weight
        shape=tuple(rows.shape),
        codec=codec.spec,
        bytes_before=floats.numel() * floats.element_size(),
        bytes_after=rows.nbytes,
        sqnr=sqnr_of_rows(floats, rows),
        tied=tuple(weight.names()[1:]),
        rounding=name,
        nearest_error=nearest_error(floats, rows, moments, wanted, gain) if compared else None,
        error=relative_error(wanted, rows, moments, gain) if compared else None,
        note=note or reason,
    )
    place(weight, rows)
    return rows, entry


def _facts(model: nn.Module, codecs: Mapping[str, Codec], rounding: Chosen, batches: list[Any]) -> dict[str, Any]:
    """What rows that are kept in a folder belong to."""
    return {
        "model": digest_of_model(model),
        "data": digest_of_data(batches),
        "codecs": {key: codec.spec for key, codec in codecs.items()},
        "rounding": f"{rounding.name} {rounding.rounding!r}" if rounding.needs_data else rounding.name,
    }


def _place_finished(weight: Weight, codec: Codec, data: Tensor, line: Mapping[str, Any]) -> Entry:
    """Put rows that an earlier call has rounded into every module that holds a weight."""
    floats = weight.slots[0].float_weight()
    place(weight, EncodedRows(data.to(floats.device), codec, weight.slots[0].shape(), floats.dtype))
    return Entry(**line)


def place(weight: Weight, rows: EncodedRows) -> None:
    """Put rows into every slot of a weight, as one Parameter."""
    shared = as_parameter(rows.data)
    for slot in weight.slots:
        held = Held(rows.codec, rows.shape, slot.transposed, slot.float_weight().requires_grad)
        become(slot.module, slot.target, rows.dtype)
        hold(slot.module, slot.parameter, shared, held)


def finish(model: nn.Module) -> None:
    """Bring up to date what depends on which modules are encoded: torch's fast path, the check of state dicts."""
    set_fast_path(model)
    check_before_loading(model, _check_state_dict, any(isinstance(module, Encoded) for module in model.modules()))


def _check_state_dict(model: nn.Module, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Encoded):
            check_rows(module, state_dict, f"{prefix}{name}." if name else prefix)
