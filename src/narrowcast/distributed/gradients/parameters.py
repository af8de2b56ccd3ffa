"""The parameters whose gradients travel: their names, their sizes, and which of them are exempt from compression."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from narrowcast.distributed.gradients.layout import is_worth_rows
from narrowcast.distributed.gradients.options import Exempt, plain_name, reals_per_element, rule_of


class Parameters:
    """Those of `model`. Without one, parameters are numbered as they come."""

    def __init__(self, model: nn.Module | None, exempt: Exempt) -> None:
        self.named = model is not None
        """Whether the names are the model's."""
        self.numels: dict[str, int] = {}
        self.shares: dict[str, int] = {}
        """Under FSDP2 by hosts: how many elements of each parameter this rank keeps residuals of."""
        self.orders: dict[str, str] = {}
        """In what order a bucket holds the elements of a parameter, where it is not that of its dimensions."""
        self.exempts: dict[str, bool] = {}
        self._names: dict[int, str] = {}
        self._travels: dict[tuple[int, int], bool] = {}
        self._rule = rule_of(exempt)
        if model is not None:
            for name, parameter in model.named_parameters():
                self._add(plain_name(name), parameter)

    def name_of(self, parameter: Tensor) -> str:
        """The name of a parameter; one that is not of the model gets a number."""
        if id(parameter) not in self._names:
            self._add(f"parameter {len(self._names)}", parameter)
        return self._names[id(parameter)]

    def is_exempt(self, name: str, numel: int, ranks: int) -> bool:
        """Whether a parameter travels without loss in whatever codec, among so many ranks."""
        return self.exempts[name] or not is_worth_rows(numel, ranks)

    def travels_in_codec(self, parameter: Tensor, ranks: int) -> bool:
        """Whether a parameter is not exempt, among so many ranks."""
        key = id(parameter), ranks
        if key not in self._travels:
            name = self.name_of(parameter)
            self._travels[key] = not self.is_exempt(name, self.numels[name], ranks)
        return self._travels[key]

    def __str__(self) -> str:
        """What every rank must have in common, in few words."""
        known = sorted((name, self.numels[name], exempt) for name, exempt in self.exempts.items())
        digest = hashlib.blake2b(repr(known).encode(), digest_size=4).hexdigest()
        return f"parameters={len(known)} exempt={sum(self.exempts.values())} #{digest}"

    def _add(self, name: str, parameter: Tensor) -> None:
        self._names[id(parameter)] = name
        self.numels[name] = reals_per_element(parameter) * parameter.numel()
        self.exempts[name] = bool(self._rule(name, parameter))
        strides = strides_in_bucket(parameter)
        if not parameter.is_contiguous() and strides == parameter.stride():
            told = [f"{stride}" for size, stride in zip(parameter.shape, strides, strict=True) if size > 1]
            self.orders[name] = f"strides {', '.join(told)}"


def strides_in_bucket(parameter: Tensor) -> tuple[int, ...]:
    """How DDP lays out a gradient: as the parameter is, if that has no gaps."""
    if parameter.is_contiguous():
        return parameter.stride()
    without_gaps = torch.empty_like(parameter, device="meta").stride()
    plain = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta").stride()
    return without_gaps if without_gaps == parameter.stride() else plain
