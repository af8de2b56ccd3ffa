"""What the state dict of a quantizer says: its grid, and facts that its tensors do not show.

Levels are a buffer. The extra state (nn/state.py) says how the weight is prepared (`normalize`), which dimension has
clips, and which observer sets them. Loading refuses another grid, another number of clips and another dimension. It
takes over whether the weight is normalized, which learned rounding switches off, and the observer that `calibrate_`
left, whose statistics are then loaded too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowcast.errors import StateDictError
from narrowcast.nn import state
from narrowcast.nn.qat.grids import CodecGrid, codec_grid, has_unsigned
from narrowcast.nn.qat.observers import OBSERVERS, describe, make_described

if TYPE_CHECKING:
    from narrowcast.nn.qat.fake_quantize import FakeQuantize


def facts_of(quantizer: FakeQuantize) -> dict[str, Any]:
    """The facts that the results of a quantizer depend on and its tensors do not show."""
    observer = None if quantizer.observer is None else describe(quantizer.observer)
    return {"normalize": quantizer.normalize, "channel_axis": quantizer.channel_axis, "observer": observer}


def take_facts(quantizer: FakeQuantize, facts: Mapping[str, Any]) -> None:
    """Apply the facts of a state dict that `check_state` has accepted."""
    normalize, observer = facts.get("normalize"), facts.get("observer")
    own = quantizer.normalize
    if {normalize, own} != {"through", "detached"}:  # which differ in gradients alone
        quantizer.normalize = normalize
    if observer is not None and facts_of(quantizer)["observer"] != observer:
        quantizer.observer = make_described(observer).to(quantizer.alpha.device)


def take_stored(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Apply the facts that a file holds, under the keys of the extra states, to the quantizers of a model."""
    for name, module in model.named_modules():
        key = (f"{name}." if name else "") + state.KEY
        if key in stored and hasattr(module, "check_state"):
            module.set_extra_state(stored[key])


def observer_keys(model: nn.Module, keys: Iterable[str]) -> list[str]:
    """The keys of a file that belong to observers of the model's quantizers."""
    quantizers = (name for name, module in model.named_modules() if hasattr(module, "check_state"))
    starts = tuple(f"{name}.observer." if name else "observer." for name in quantizers)
    return [key for key in keys if key.startswith(starts)]


def check_state(quantizer: FakeQuantize, state_dict: Mapping[str, Any], prefix: str) -> CodecGrid | None:
    """The grid that a state dict was made with, refused if it is not one of the codec's; None if it has none."""
    grid = _check_tensors(quantizer, state_dict, prefix)
    facts = state.facts_in(state_dict, prefix)
    if facts is not None:
        _check_facts(quantizer, facts, prefix)
    return grid


def _check_tensors(quantizer: FakeQuantize, state_dict: Mapping[str, Any], prefix: str) -> CodecGrid | None:
    levels, alpha = state_dict.get(prefix + "levels"), state_dict.get(prefix + "alpha")
    if not isinstance(levels, Tensor) or not isinstance(alpha, Tensor):
        return None
    own, codec = quantizer.alpha, quantizer.codec
    signs = [True, False] if quantizer.signed is None and has_unsigned(codec) else [quantizer.signed is not False]
    grids = [codec_grid(codec, sign) for sign in signs]
    fitting = [grid for grid in grids if torch.equal(grid.levels, levels.detach().float().cpu())]
    if not fitting:
        raise StateDictError(
            f"state_dict[{prefix + 'levels'!r}]: it was trained on another grid, with {levels.numel()} levels from "
            f"{float(levels[0]):g} to {float(levels[-1]):g}, and this one is {codec.spec!r}, with "
            f"{_ranges(grids)}. Prepare the model with the codecs (and signs) it was trained with. Nothing was "
            "loaded."
        )
    if own.numel() and alpha.shape != own.shape:
        raise StateDictError(
            f"state_dict[{prefix + 'alpha'!r}]: it has {alpha.numel()} clip(s), and this quantizer "
            f"{own.numel()}. One of them is per channel, the other per tensor, or the layer has another "
            "size. Nothing was loaded."
        )
    return fitting[0]


def _check_facts(quantizer: FakeQuantize, facts: Mapping[str, Any], prefix: str) -> None:
    own, key = facts_of(quantizer), prefix + state.KEY
    if facts.get("channel_axis") != own["channel_axis"]:
        raise StateDictError(
            f"state_dict[{key!r}]: its clips are those of channel_axis={facts.get('channel_axis')}, and this "
            f"quantizer's of channel_axis={own['channel_axis']}. Make it with the axis it was trained with. Nothing "
            "was loaded."
        )
    observer = facts.get("observer")
    if observer is not None and observer[0] not in OBSERVERS and (own["observer"] or [None])[0] != observer[0]:
        raise StateDictError(
            f"state_dict[{key!r}]: its clips follow the data by an observer of the class {observer[0]}, which is not "
            "one of narrowcast's and cannot be made from its name. Give the quantizer one first: "
            "quantizer.observer = ..., or call calibrate_ with the same observer=. Nothing was loaded."
        )


def _ranges(grids: list[CodecGrid]) -> str:
    ranges = [
        f"{len(levels)} from {levels[0]:g} to {levels[-1]:g}" for levels in (grid.levels.tolist() for grid in grids)
    ]
    return " or ".join(ranges)
