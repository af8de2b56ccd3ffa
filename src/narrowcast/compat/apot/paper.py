"""Checkpoints of the paper's own code, github.com/yhhhli/APoT_Quantization, in models of this library.

    model = ResNet20()                                              # floats, modules named as in the checkpoint
    checkpoint = torch.load("res20_4bit/model_best.pth.tar", map_location="cpu", weights_only=True)
    import_checkpoint_(model, checkpoint, bits=4)                   # prepared, weights and clips loaded
    narrowcast.convert_(model.eval())                               # packed, if it is not to be trained further

What such a checkpoint means:

- A layer with `weight_quant.wgt_alpha` and `act_alpha` has one clip for its weights and one for its inputs, which are
  never negative. Weights are normalized without multiplying the deviation back (`normalize="paper"`): the statistics of
  the batch norm behind are those of the normalized layer. The grids are this library's "apot2" to "apot5".
- The first and the last layer have weights of 8 bits, an integer times max / 127, and inputs in floats. max is the
  largest weight, not the largest magnitude, and nothing is clipped: where weights reach below -128 steps, the grid is a
  table of 256 integers, those in use among them.
- How many bits it was trained with is in the name of its folder, not in the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.codecs import Codec, Levels
from narrowcast.codecs import codec as as_codec
from narrowcast.errors import SpecError, StateDictError
from narrowcast.nn.qat.layers import TRAINED, Trained
from narrowcast.nn.qat.prepare import prepare_qat_
from narrowcast.nn.report import Report

BITS = (2, 3, 4, 5, 32)
WEIGHT_CLIP, INPUT_CLIP = ".weight_quant.wgt_alpha", ".act_alpha"
STEPS = 127
"""Of the largest weight, in the first and the last layer."""


@torch.no_grad()
def import_checkpoint_(model: nn.Module, checkpoint: Mapping[str, Any], bits: int) -> Report:
    """Load a checkpoint of APoT_Quantization into a float model, in place, prepared as it was trained.

    `model` has plain layers under the names of the checkpoint, which is what torch.load gives, or its "state_dict".
    `bits` is what it was trained with: 2 to 5, or 32, whose first and last layer have 8. The model is unchanged if the
    checkpoint does not fit. What is returned is the report of `prepare_qat_`.
    """
    if bits not in BITS:
        raise SpecError(f"bits={bits!r}: the paper's code trains {', '.join(map(str, BITS))}.")
    state = _plain_names(checkpoint.get("state_dict", checkpoint) if isinstance(checkpoint, Mapping) else checkpoint)
    floats = {key: value for key, value in state.items() if not key.endswith((WEIGHT_CLIP, INPUT_CLIP))}
    clipped = [key.removesuffix(WEIGHT_CLIP) for key in state if key.endswith(WEIGHT_CLIP)]
    layers = [name for name, module in model.named_modules() if isinstance(module, tuple(TRAINED))]
    _check(model, state, floats, clipped, bits)
    if len(layers) < 2:
        raise StateDictError("model: it has no first and last layer. Give it the layers of the checkpoint.")
    ends = [layers[0], layers[-1]]
    _check_numbers(state, ends, clipped, [name for name in layers if name not in ends])
    outer = {name: _outer_codec(floats[f"{name}.weight"]) for name in ends}
    model.load_state_dict(floats)
    rules: dict[str, Codec | None] = {f"^{re.escape(name)}$": outer.get(name) for name in layers if name not in clipped}
    report = prepare_qat_(
        model,
        f"apot{bits if bits < 32 else 4}",
        f"apot{bits if bits < 32 else 4}",
        rules=rules,
        input_rules={f"^{re.escape(name)}$": None for name in ends},
        first_last=None,
        per_channel=False,
        normalize="paper",
    )
    for name, module in model.named_modules():
        if isinstance(module, Trained):
            _set_clips(name, module, state, outer)
    return report


def _set_clips(name: str, module: Trained, state: Mapping[str, Tensor], outer: Mapping[str, Codec]) -> None:
    if name in outer:
        top = module.weight_quantizer.top
        module.weight_quantizer.set_clip(module.weight.max() * (top / STEPS))
        return
    assert module.input_quantizer is not None
    module.weight_quantizer.set_clip(state[name + WEIGHT_CLIP])
    module.input_quantizer.set_clip(state[name + INPUT_CLIP], signed=False)


def _outer_codec(weight: Tensor) -> Codec:
    """int8, or where weights reach further, a table of integers: those in use, and the ones nearest to zero."""
    used = (weight / weight.max() * STEPS).round()
    if float(used.min()) >= -128:
        return as_codec("int8")
    levels = set(used.flatten().tolist())
    for level in sorted(range(-STEPS, STEPS + 1), key=abs):
        if len(levels) < 256:
            levels.add(float(level))
    if len(levels) > 256:
        raise StateDictError(
            f"checkpoint: the weights of its first or last layer have {len(levels)} different codes, down to "
            f"{int(used.min())}, and a table holds 256. No checkpoint that the paper released is like that."
        )
    return Levels(torch.tensor(sorted(levels), dtype=torch.float32, device="cpu"))


def _plain_names(state: object) -> dict[str, Tensor]:
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise StateDictError(
            f"checkpoint: expected what torch.load gives for a file of APoT_Quantization, a mapping with "
            f'"state_dict", or that state dict, got {type(state).__name__}.'
        )
    return {key.removeprefix("module."): value for key, value in state.items()}  # nn.DataParallel's


def _check(
    model: nn.Module, state: Mapping[str, Tensor], floats: Mapping[str, Tensor], clipped: list[str], bits: int
) -> None:
    """Refuse what does not fit before the model changes."""
    own = model.state_dict()
    differing = [key for key in {**own, **floats} if key not in own or key not in floats]
    differing += [key for key in own if key in floats and own[key].shape != floats[key].shape]
    differing += [name + INPUT_CLIP for name in clipped if name + INPUT_CLIP not in state]
    if differing:
        raise StateDictError(
            f"checkpoint: it and the model differ in {', '.join(sorted(differing)[:4])}"
            f"{' and more' if len(differing) > 4 else ''}: a tensor that one of them lacks, or of another shape. Give "
            "the model the layers and names of the checkpoint; examples/apot_resnet20.py has those of ResNet-20. The "
            "model was left as it was."
        )
    if bool(clipped) != (bits < 32):
        raise SpecError(
            f"bits={bits}: the checkpoint has {len(clipped)} layers with clips, and only one of 32 bits has none. "
            "The model was left as it was."
        )


def _check_numbers(state: Mapping[str, Tensor], ends: list[str], clipped: list[str], inner: list[str]) -> None:
    """Refuse clips of other layers than those within, and numbers from which no grid can be made."""
    others = [name for name in clipped if name not in inner]
    if others:
        raise StateDictError(
            f"checkpoint: it has clips of {', '.join(others[:4])}, and layers with clips are those between the first "
            f"and the last one, {ends[0]} and {ends[-1]}. The model was left as it was."
        )
    for key in (name + kind for name in clipped for kind in (WEIGHT_CLIP, INPUT_CLIP)):
        if state[key].numel() != 1 or not 0 < float(state[key]) < math.inf:
            raise StateDictError(
                f"checkpoint: {key} is {state[key].tolist()}, and a clip is one positive number. The training run "
                "diverged, or the file is of another form. The model was left as it was."
            )
    for key in (f"{name}.weight" for name in ends):
        if not bool(state[key].isfinite().all()) or float(state[key].max()) <= 0:
            raise StateDictError(
                f"checkpoint: {key} has 127 steps up to its largest weight, which is {float(state[key].max())}: it "
                "must be positive, and all weights finite. The model was left as it was."
            )
