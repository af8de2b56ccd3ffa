"""From a trained model to packed layers, in place.

`convert_` turns each layer of `prepare_qat_` into the packed layer of the same kind. Its rows decode to exactly the
weight that training used: the codes are those of the levels, the stored scale is the learned one. Layers with quantized
inputs become integer layers where both grids are integers that fit a byte, else packed layers behind a quantizer (see
input_grids.py). Everything is checked before the first layer changes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from narrowcast.errors import CalibrationError, QuantizeError
from narrowcast.kernels.operators.fake_quantize import fake_quantize
from narrowcast.nn.modules.base import Held, as_parameter, become, hold
from narrowcast.nn.noise import sqnr
from narrowcast.nn.qat.fake_quantize import FakeQuantize
from narrowcast.nn.qat.grids import write_rows
from narrowcast.nn.qat.input_grids import QUANTIZER, layer_class
from narrowcast.nn.qat.integer import IntegerLayer
from narrowcast.nn.qat.layers import Trained, untrain
from narrowcast.nn.qat.prepare import check_state_dict
from narrowcast.nn.quantize import as_module, finish
from narrowcast.nn.report import Entry, Report
from narrowcast.nn.state import check_before_loading
from narrowcast.nn.survey import TARGETS, join


class Packed(NamedTuple):
    """The rows of one weight, shared by all layers that share the weight."""

    data: nn.Parameter
    held: Held
    entry: Entry


def convert_(model: nn.Module) -> Report:
    """Pack a trained model, in place: what its layers compute stays the same, within a few roundings.

    The model's mode does not change; packed weights are not trained any more.
    """
    layers = _layers(as_module(model))
    packed: dict[int, Packed] = {}
    for name, module in layers.items():
        key, known = join(name, "weight"), packed.get(id(module.weight))
        if known is None:
            packed[id(module.weight)] = _pack(key, module)
        else:
            packed[id(module.weight)] = known._replace(entry=known.entry._replace(tied=(*known.entry.tied, key)))
    for module in layers.values():
        _change(module, packed[id(module.weight)])
    check_before_loading(model, check_state_dict, False)
    finish(model)
    return Report([weight.entry for weight in packed.values()])


def _layers(model: nn.Module) -> dict[str, Trained]:
    """The layers to pack, by name; refused if one of them cannot be packed."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Trained)}
    if not layers:
        raise QuantizeError(
            "model: none of its layers was trained with quantized weights. Call prepare_qat_(model), train, and then "
            "convert_(model); to quantize a float model as it is, call quantize_(model)."
        )
    for name, module in layers.items():
        for kind in ("weight_quantizer", "input_quantizer"):
            quantizer = getattr(module, kind)
            if quantizer is not None and not quantizer.is_started:
                raise CalibrationError(
                    f"model: {join(name, kind)} has no clip yet, since it has seen no data. Train the model, or call "
                    "calibrate_(model, loader), before convert_(model). The model was left as it was."
                )
        if type(module.weight.data) is not Tensor:
            raise QuantizeError(
                f"model: {join(name, 'weight')} is a {type(module.weight.data).__name__}, of which this rank holds a "
                "part. Load the full state dict (torch.distributed.checkpoint.state_dict.get_model_state_dict with "
                "full_state_dict=True) into a plain model that was prepared the same way, and convert that."
            )
        if not bool(torch.isfinite(module.weight).all()):
            raise QuantizeError(
                f"model: {join(name, 'weight')} holds an infinity or a NaN: training diverged. Go back to a checkpoint "
                "from before. The model was left as it was."
            )
    return layers


@torch.no_grad()
def _pack(key: str, module: Trained) -> Packed:
    quantizer, weight = module.weight_quantizer, module.weight.detach()
    grid = quantizer.codec_grid
    values, scale = exact_weight(quantizer, weight)
    data = write_rows(values.reshape(len(weight), -1), scale, grid)
    entry = Entry(
        name=key,
        kind=module._plain_class.__name__,
        shape=tuple(weight.shape),
        codec=grid.codec.spec,
        bytes_before=weight.numel() * weight.element_size(),
        bytes_after=data.numel(),
        sqnr=sqnr(quantizer.target(weight), values),
    )
    return Packed(as_parameter(data), Held(grid.codec, weight.shape, False, module.weight.requires_grad), entry)


@torch.no_grad()
def exact_weight(quantizer: FakeQuantize, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The quantized weight in fp32, and the scale of each of its rows."""
    was = quantizer.training
    shifted, scale = quantizer.eval().prepared(weight)
    quantizer.train(was)
    values = fake_quantize(shifted.float(), scale, quantizer.grid, quantizer.channel_axis)
    return values, scale.expand(len(weight)).contiguous()


def _change(module: Trained, packed: Packed) -> None:
    base = next(kind for kind in TARGETS if isinstance(module, kind))
    quantizer, dtype = module.input_quantizer, module.weight.dtype
    target = TARGETS[base]
    if quantizer is not None:
        target = layer_class(base, tuple(module.weight.shape), module.weight_quantizer.codec_grid, quantizer.codec_grid)
    untrain(module)
    become(module, target, dtype)
    hold(module, "weight", packed.data, packed.held)
    if quantizer is not None:
        quantizer.signed = quantizer._signed  # data decides no more
        quantizer.alpha.requires_grad_(False)
        quantizer.observer = None
        module.add_module(QUANTIZER, quantizer)
    if isinstance(module, IntegerLayer):
        module.unpack()
