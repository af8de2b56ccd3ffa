"""Which layers of a packed model quantize their inputs, on which grid, and how a loaded model gets the same layers.

A packed layer with a quantized input is one of the classes of integer.py. Which one follows from the two grids: an
integer layer where both are integers that fit a byte, else a packed layer behind a quantizer. So a file has to say only
the codec of the input and whether its grid is signed. `quantized_inputs(model)` says it, and
`adopt_inputs(model, inputs)` makes such layers of packed ones, with clips that are still to be loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

from torch import nn

from narrowcast.codecs import Codec
from narrowcast.errors import SpecError, StateDictError
from narrowcast.nn.modules.base import Encoded, OneWeight
from narrowcast.nn.qat import integer as layers
from narrowcast.nn.qat.fake_quantize import FakeQuantize
from narrowcast.nn.qat.grids import CodecGrid, codec_grid
from narrowcast.nn.quantize import as_module
from narrowcast.nn.survey import join

QUANTIZER = "input_quantizer"
Inputs = dict[str, tuple[Codec, bool]]
"""Of each layer, by its name: the codec of its input, and whether the grid is signed."""

INTEGER: dict[type[nn.Module], type[Encoded]] = {
    nn.Linear: layers.IntegerLinear,
    nn.Conv1d: layers.IntegerConv1d,
    nn.Conv2d: layers.IntegerConv2d,
}
FLOAT: dict[type[nn.Module], type[Encoded]] = {
    nn.Linear: layers.QuantizedInputLinear,
    nn.Conv1d: layers.QuantizedInputConv1d,
    nn.Conv2d: layers.QuantizedInputConv2d,
    nn.Conv3d: layers.QuantizedInputConv3d,
}


def layer_class(base: type[nn.Module], shape: tuple[int, ...], weight: CodecGrid, inputs: CodecGrid) -> type[Encoded]:
    """The class of a layer that stands for `base`, with a weight of `shape` on one grid and inputs on another."""
    # Zero must be one of the input's levels, for padding; and longer sums of products may not fit an int32.
    fits = weight.integer_offset() == 0 and inputs.integer_offset() is not None
    fits = fits and bool((inputs.levels == 0).any()) and math.prod(shape[1:]) < 2**17
    return INTEGER[base] if fits and base in INTEGER else FLOAT[base]


def quantized_inputs(model: nn.Module) -> Inputs:
    """The layers of a converted model whose inputs are quantized."""
    return {
        name: (module.input_quantizer.codec, module.input_quantizer.codec_grid.signed)
        for name, module in as_module(model).named_modules(remove_duplicate=False)
        if isinstance(module, (layers.IntegerLayer, layers.QuantizedInput))
    }


def input_keys(layer: str) -> list[str]:
    """The keys of a state dict that belong to the quantizer of a layer's input."""
    return [join(layer, f"{QUANTIZER}.{name}") for name in FakeQuantize("int8").state_dict()]


def adopt_inputs(model: nn.Module, wanted: Mapping[str, tuple[Codec, bool]]) -> None:
    """Make packed layers quantize their inputs. Their clips and rows are still to be loaded.

    The model is unchanged if one of the layers cannot.
    """
    modules = dict(as_module(model).named_modules(remove_duplicate=False))
    chosen: dict[nn.Module, tuple[type[Encoded], FakeQuantize]] = {}
    for name, (codec, signed) in wanted.items():
        module = modules.get(name)
        if module not in chosen:
            chosen[cast(nn.Module, module)] = _choose_class(name, module, codec, signed)
    for module, (target, quantizer) in chosen.items():
        module.__class__ = target
        module.add_module(QUANTIZER, quantizer.train(module.training))
        if isinstance(module, layers.IntegerLayer):
            module.reserve()


def _choose_class(
    name: str, module: nn.Module | None, codec: Codec, signed: bool
) -> tuple[type[Encoded], FakeQuantize]:
    base = next((base for base in FLOAT if isinstance(module, OneWeight) and module.float_class is base), None)
    if base is None or isinstance(module, (layers.IntegerLayer, layers.QuantizedInput)):
        kind = "nothing" if module is None else f"a {type(module).__name__}"
        raise StateDictError(
            f"{name!r}: quantized inputs belong to a packed Linear or convolution, and the model has {kind} "
            "there. The file is another model's, or its keys have a prefix."
        )
    layer = cast(OneWeight, module)
    try:
        weight, inputs = codec_grid(layer.codec), codec_grid(codec, signed)
    except SpecError as error:
        raise StateDictError(f"{name!r}: no layer can have been trained like that: {error}") from error
    quantizer = FakeQuantize(codec, learn=False, signed=signed, device=layer.weight.device)
    return layer_class(base, tuple(layer.held.shape), weight, inputs), quantizer
