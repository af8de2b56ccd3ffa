"""The inputs of a model's weights, counted while the model runs.

`recording(weights)` is a context in which every forward pass adds to the moments of these weights, which it yields by
the weight's key. Where inputs are found:

- a Linear, a transformers Conv1D or a convolution: its own input;
- an attention: query, key and value, for its packed or separate projections. Torch's module multiplies with its output
  projection without calling it, so attention runs in the encoded module's forward meanwhile, which calls it;
- experts: products of torch (linear, matmul, bmm, grouped_mm) with one expert's part of the weight.

Embeddings have no inputs to multiply with, and recurrent layers take many steps in one call: for these there is a
reason instead of moments (`why_no_moments`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from narrowcast.nn.modules.attention import APART, PACKED
from narrowcast.nn.modules.base import Encoded, become, restore
from narrowcast.nn.modules.conv import Convolution
from narrowcast.nn.modules.linear import Linear
from narrowcast.nn.rounding.moments import InputMoments
from narrowcast.nn.survey import Slot, Weight


def why_no_moments(weight: Weight) -> str:
    """Why a rounding cannot know the inputs of a weight; empty where it can."""
    kinds = [slot.target.float_class for slot in weight.slots]
    if nn.Embedding in kinds:
        return "an embedding: its rows are looked up, not multiplied"
    if any(issubclass(kind, nn.RNNBase) for kind in kinds):
        return "a recurrent layer: its steps are not followed"
    if len(weight.slots) > 1 and any(_of_experts(slot) or slot.parameter != "weight" for slot in weight.slots):
        return "tied between modules of different kinds"
    return ""


@contextmanager
def recording(weights: Iterable[Weight], kind: type[InputMoments] = InputMoments) -> Iterator[dict[str, InputMoments]]:
    """The moments of weights, by the key of their first slot; each forward pass in this context adds to them."""
    moments: dict[str, InputMoments] = {}
    experts: dict[int, InputMoments] = {}
    with ExitStack() as stack:
        for weight in weights:
            if why_no_moments(weight):
                continue
            first = weight.slots[0]
            own = moments[first.key] = kind(first.module, _groups(first))
            for slot in weight.slots:
                if _of_experts(slot):
                    experts[slot.float_weight().untyped_storage().data_ptr()] = own
                else:
                    hook = slot.module.register_forward_pre_hook(partial(_count, slot, own), with_kwargs=True)
                    stack.callback(hook.remove)
        if experts:
            stack.enter_context(_WatchExperts(experts))
        yield moments


def keep_tokens(moments: Mapping[str, InputMoments], mask: Tensor | None) -> None:
    """Let padding not count in the batch that runs next."""
    for own in moments.values():
        own.keep = mask


@contextmanager
def attention_calls_projections(weights: Iterable[Weight]) -> Iterator[None]:
    """Let attention run in the encoded module's forward; afterwards those that hold no rows are torch's again."""
    parents = [slot for weight in weights for slot in weight.slots if slot.target.float_class is nn.MultiheadAttention]
    changed = []
    try:
        for slot in parents:
            if not isinstance(slot.module, Encoded):
                become(slot.module, slot.target, slot.float_weight().dtype)
                changed.append(slot.module)
        yield
    finally:
        for module in changed:
            if isinstance(module, Encoded) and not module._held:
                restore(module, {})


def _of_experts(slot: Slot) -> bool:
    return slot.lead == 2


def _groups(slot: Slot) -> int | None:
    if _of_experts(slot):
        return slot.float_weight().shape[0]
    if slot.parameter == PACKED:
        return 3
    return None if issubclass(slot.target, (Linear, Convolution)) else 1


def _count(
    slot: Slot, moments: InputMoments, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    if slot.parameter == "weight":
        moments.add(input_of(args, kwargs))
        return
    names = ("query", "key", "value")
    vectors = [args[place] if place < len(args) else kwargs[name] for place, name in enumerate(names)]
    if slot.parameter == PACKED:
        for group, x in enumerate(vectors):
            moments.add_to_group(group, x)
    else:
        moments.add_to_group(0, vectors[APART.index(slot.parameter)])


def input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The input of a layer's call."""
    x: Tensor = args[0] if args else kwargs.get("input", kwargs.get("x"))
    return x


@contextmanager
def keeping_inputs(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Tensor]]]:
    """The inputs of modules' calls, by the name given here and in the order of calls: a dictionary to be emptied."""
    kept: dict[str, list[Tensor]] = {}

    def keep(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        kept.setdefault(name, []).append(input_of(args, kwargs))

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_pre_hook(partial(keep, name), with_kwargs=True).remove)
        yield kept


# -- experts -----------------------------------------------------------------------------------------------------------


class _WatchExperts(TorchFunctionMode):
    """Counts the vectors that experts are multiplied with. A weight is known by the memory that it lies in."""

    def __init__(self, experts: Mapping[int, InputMoments]) -> None:
        super().__init__()
        self.experts = experts

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        watch = _PRODUCTS.get(func)
        if watch is not None and len(args) >= 2 and all(isinstance(value, Tensor) for value in args[:2]):
            watch(self, args[0], args[1], kwargs)
        return func(*args, **kwargs)

    def count(self, x: Tensor, weight: Tensor, input_last: bool) -> bool:
        """Count the inputs of a matrix, if it is an expert's and its inputs lie along this dimension; whether it is."""
        moments = self.experts.get(weight.untyped_storage().data_ptr())
        if moments is None or weight.dim() != 2 or not weight.is_floating_point():
            return False
        inside = weight.stride(-1) if input_last else weight.stride(-2)
        per_expert = weight.shape[0] * weight.shape[1]
        if inside != 1 or weight.storage_offset() % per_expert:
            return False
        moments.add_to_group(weight.storage_offset() // per_expert, x)
        return True

    def linear(self, x: Tensor, weight: Tensor, kwargs: Mapping[str, Any]) -> None:
        self.count(x, weight, input_last=True)

    def matmul(self, x: Tensor, weight: Tensor, kwargs: Mapping[str, Any]) -> None:
        if weight.dim() != 3:
            self.count(x, weight, input_last=False)
        elif x.dim() == 3 and weight.untyped_storage().data_ptr() in self.experts:
            for expert, part in enumerate(weight):
                self.count(x[expert if len(x) > 1 else 0], part, input_last=False)

    def grouped(self, x: Tensor, weight: Tensor, kwargs: Mapping[str, Any]) -> None:
        offsets = kwargs.get("offs")
        if offsets is None or weight.dim() != 3 or x.dim() != 2:
            return
        start = 0
        for part, end in zip(weight, offsets.tolist(), strict=True):
            if end > start:
                self.count(x[start:end], part, input_last=False)
            start = max(start, end)


_PRODUCTS: dict[Any, Callable[[_WatchExperts, Tensor, Tensor, Mapping[str, Any]], None]] = {
    F.linear: _WatchExperts.linear,
    **dict.fromkeys(
        (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__),
        _WatchExperts.matmul,
    ),
}
for _grouped in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)):
    if _grouped is not None:
        _PRODUCTS[_grouped] = _WatchExperts.grouped
