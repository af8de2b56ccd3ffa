"""Recurrent layers whose weights are encoded rows.

`LSTM`, `GRU` and `RNN` are torch's modules with any of their matrices (`weight_ih_l0`, `weight_hh_l0`, ...) encoded: a
row for each output of a gate. Each forward pass decodes them once, for all steps of the sequence, and then runs torch's
own kernels: less memory at rest, the same arithmetic. Every option of torch's modules is kept.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from narrowcast.nn.modules.base import Encoded, encoded_parameters, float_dtype_of


class Recurrent(Encoded):
    """What recurrent layers share. torch's modules hold their weights twice: as parameters, and in `_flat_weights`."""

    _flat_weights_names: list[str]

    @property
    def _flat_weights(self) -> list[Tensor]:
        """The weights and biases as torch's kernels take them, decoded where they are rows."""
        held, dtype = encoded_parameters(self), float_dtype_of(self)
        weights = {name: self._parameters[name] for name in self._flat_weights_names}
        return [held[name].decode(own, dtype) if name in held else own for name, own in weights.items()]  # type: ignore[arg-type, misc]

    @_flat_weights.setter
    def _flat_weights(self, weights: list[Tensor]) -> None:
        """torch sets it when parameters move. It is made of them here, so there is nothing to keep."""

    def flatten_parameters(self) -> None:
        """Nothing to do: cuDNN's one piece of memory is for weights that stay floats."""

    def _update_flat_weights(self) -> None:
        """Nothing to do: `_flat_weights` is made anew for each call."""

    def _enter(self) -> None:
        vars(self).pop("_flat_weights", None)
        vars(self)["_flat_weight_refs"] = []

    def _leave(self) -> None:
        weights = [self._parameters[name] for name in self._flat_weights_names]
        refs = [None if weight is None else weakref.ref(weight) for weight in weights]
        vars(self).update(_flat_weights=weights, _flat_weight_refs=refs)

    def extra_repr(self) -> str:
        codecs = {name: held.codec.spec for name, held in encoded_parameters(self).items()}
        described: Any = self.float_class.extra_repr(self)
        return f"{described}, codecs={codecs}"


class LSTM(Recurrent, nn.LSTM):  # type: ignore[misc]  # a property for an attribute
    """torch.nn.LSTM on encoded rows."""

    float_class = nn.LSTM


class GRU(Recurrent, nn.GRU):  # type: ignore[misc]  # a property for an attribute
    """torch.nn.GRU on encoded rows."""

    float_class = nn.GRU


class RNN(Recurrent, nn.RNN):  # type: ignore[misc]  # a property for an attribute
    """torch.nn.RNN on encoded rows."""

    float_class = nn.RNN
