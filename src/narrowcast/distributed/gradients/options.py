"""The arguments of compress_gradients, and the words in which it refuses the rest."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs import codec as as_codec
from narrowcast.distributed.collectives import AnyCodec
from narrowcast.errors import SpecError

Mode = bool | Literal["owner"]
FEEDBACK_WORDS: dict[Mode, str] = {
    True: ", error feedback",
    "owner": ", error feedback at the owner",
    False: "",
}
Exempt = Callable[[str, Tensor], bool] | str | Sequence[str] | None


def one_dimensional(name: str, parameter: Tensor) -> bool:
    """Norms and biases: few elements, and the ones that quantization hurts most."""
    return parameter.dim() <= 1


def reals_per_element(parameter: Tensor) -> int:
    """A complex element travels as two real numbers."""
    return 2 if parameter.is_complex() else 1


def codec_of(given: AnyCodec) -> Codec:
    if callable(given):
        raise SpecError(
            f"codec={given!r}: a function of the step goes by another name: schedule=. For example "
            'compress_gradients(model, schedule=lambda step: "int8" if step < 1000 else "int4").'
        )
    return for_gradients(as_codec(given))


@functools.lru_cache(maxsize=256)
def for_gradients(codec: Codec) -> Codec:
    """A codec that can carry gradients: one that tells a number from its negative."""
    signs = torch.tensor([[-1.0, 1.0] * 4], dtype=torch.float32, device="cpu")
    there = codec.decode(codec.encode(signs, 0), 8)[0]
    if not (there[0] < 0 < there[1]):
        raise SpecError(
            f"codec={codec.spec!r} has no gradient sense: it turns -1, 1 into {there[0]:g}, {there[1]:g}, and "
            'gradients need both signs. Choose for example "int8", "int4", or a table with negative levels.'
        )
    return codec


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return re.sub(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.)", "", name).lstrip(".")


Kind = Literal["momentum", "changes", "sgd", "adam"]
"""What steps are made of: a momentum that travelled, changes of parameters, gradients, or gradients over the root of a
second moment."""
FEWEST_BITS: dict[Kind | None, int] = {"momentum": 1, "changes": 1, "sgd": 2, "adam": 8, None: 4}
"""Error feedback is on by default from so many bits an element to below 8. Adam and its kind gain nothing by it: at 3
bits and more losses are alike, and residuals cost memory; at fewer bits they swell the second moment, and the loss ends
higher. SGD and Muon may gain down to 2 bits, and lose in `sign`. Where the optimizer is not known (None), it is on
where it does no harm with any. bench/results/simulated.md has the losses."""


def mode_of(given: Mode | None, codec: Codec | None, schedule: object = None, kind: Kind | None = None) -> Mode:
    """What `error_feedback` means: what is given, or what trains best with this codec and kind of optimizer."""
    if given is None:
        bits = 32 if codec is None else codec.format.bits
        return kind != "adam" if schedule is not None else FEWEST_BITS[kind] <= bits < 8
    if given not in (True, False, "owner"):
        raise SpecError(
            f'error_feedback={given!r}: True (sender and owner), "owner" (there only), False, or None for what trains '
            "best: True from 4 bits to below 8, from 2 with optimizer=torch.optim.SGD(...), from 1 with momentum= or "
            "sync_every=, and otherwise False with an optimizer= like Adam."
        )
    return given


RESIDUAL_CODECS = ("int8", "bf16")
"""What residuals can be held in but fp32: codecs that lose nothing of what they have decoded themselves, in blocks
that do not reach over two sections of a parameter (error_feedback/held.py)."""


def residual_codec_of(given: AnyCodec | None, mode: Mode, undecided: bool) -> Codec | None:
    """What residuals are held in; None for fp32. `undecided`: whether there are any is not known yet."""
    if given is None:
        return None
    chosen = as_codec(given)
    if chosen.spec not in {as_codec(name).spec for name in RESIDUAL_CODECS}:
        raise SpecError(
            f"residual_codec={chosen.spec!r}: residuals are held in 'int8', 'bf16', or None for fp32. Other codecs "
            "round a second time when residuals move to another bucket or are loaded, and a resumed run would differ."
        )
    if not mode and not undecided:
        raise SpecError(
            f"residual_codec={chosen.spec!r}: there are no residuals without error feedback, which is off here. Pass "
            "error_feedback=True, or leave residual_codec= out."
        )
    return chosen


def kind_of(optimizer: object, momentum: object) -> Kind | None:
    """What steps are made of, as far as the class of the optimizer tells; a wrapper's is what it wraps."""
    if momentum is not None:
        return "momentum"
    if optimizer is None:
        return None  # and torch.optim, which takes a second to load, is left alone
    while optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    if isinstance(optimizer, (torch.optim.SGD, getattr(torch.optim, "Muon", torch.optim.SGD))):
        return "sgd"
    return "adam" if isinstance(optimizer, tuple(getattr(torch.optim, name) for name in LIKE_ADAM)) else None


def optimizers_of(given: object) -> list[Any]:
    """The optimizers whose steps are counted on; a wrapper's is what it wraps."""
    optimizers = []
    for each in given if isinstance(given, (list, tuple)) else [given]:
        optimizer: Any = each
        while not isinstance(optimizer, torch.optim.Optimizer) and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        name = type(optimizer).__name__
        if not hasattr(optimizer, "register_step_post_hook"):
            raise SpecError(
                f"optimizer={'None' if each is None else name}: with sync_every= ranks meet after its steps, so it is "
                "the torch.optim.Optimizer of the model, or a list of all of them. Make it first, then pass "
                "compress_gradients(ddp, ..., sync_every=10, optimizer=optimizer)."
            )
        if name in _NOT_ALONE:
            raise SpecError(f"optimizer={name} with sync_every=: {_NOT_ALONE[name]}")
        optimizers.append(optimizer)
    return optimizers


_NOT_ALONE = {
    "LBFGS": "it calls backward as often as the loss of a rank asks for, so ranks would not take the same steps. Use "
    "an optimizer with one backward a step, or leave sync_every= out.",
    "ZeroRedundancyOptimizer": "it steps a part of the parameters on each rank, and sends them to the others in every "
    "step. Use the optimizer that it wraps, or leave sync_every= out.",
}


LIKE_ADAM = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adafactor", "RMSprop", "Adagrad", "Adadelta")


def spoken(codec: Codec | None, how: str, chosen: bool, feedback: Mode) -> str:
    """In what gradients travel, in words: "int8", "auto: int4 with error feedback"."""
    spec = "no codec" if codec is None else codec.spec
    if how == "auto":
        spec = f"auto: {spec}" if chosen else "auto, not chosen yet"
    return ("schedule" if how == "schedule" else spec) + FEEDBACK_WORDS[feedback]


def rule_of(exempt: Exempt) -> Callable[[str, Tensor], bool]:
    if exempt is None:
        return lambda name, parameter: False
    if callable(exempt):
        return exempt
    try:
        patterns = [re.compile(pattern) for pattern in ([exempt] if isinstance(exempt, str) else exempt)]
        for pattern in patterns:
            pattern.search("")  # one of bytes cannot
    except (re.error, TypeError) as error:
        raise SpecError(
            f"exempt={exempt!r}: a function (name, parameter) -> bool, a regex or a list of them, or None: {error}. "
            'For example exempt=["bias", "norm"].'
        ) from error
    return lambda name, parameter: any(pattern.search(name) for pattern in patterns)
