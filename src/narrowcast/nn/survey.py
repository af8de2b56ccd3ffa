"""Which weights of a model can be encoded, and why the others cannot.

A `Slot` is one parameter of one module that has an encoded form: the weight of a Linear, Embedding or convolution, the
projections of an attention, the 3-D weights of experts. A module counts if its class computes what torch's does:
torch's class itself, or a subclass that adds nothing to it. Every other weight, of two dimensions or more, is a `Skip`
with the reason; vectors are biases and norms, which stay as they are and are not listed.

A `Weight` is a Parameter with all its slots: several where it is tied. A survey holds no Parameter, so that each can be
freed as soon as its module drops it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from narrowcast.codecs import checks
from narrowcast.nn.direct_reads import find_direct_reads
from narrowcast.nn.modules.attention import APART, PACKED, MultiheadAttention
from narrowcast.nn.modules.base import Encoded, encoded_parameters, float_class_of
from narrowcast.nn.modules.conv import Conv1d, Conv2d, Conv3d
from narrowcast.nn.modules.embedding import Embedding
from narrowcast.nn.modules.experts import experts_class
from narrowcast.nn.modules.linear import Linear
from narrowcast.nn.modules.recurrent import GRU, LSTM, RNN

TARGETS: dict[type[nn.Module], type[Encoded]] = {
    target.float_class: target
    for target in (Linear, Embedding, Conv1d, Conv2d, Conv3d, MultiheadAttention, LSTM, GRU, RNN)
}
COMPUTED = "its weight is computed from other parameters (weight_norm, pruning)"
# What a subclass may define and still compute what its base class does.
_HARMLESS = {"__init__", "__module__", "__doc__", "__qualname__", "__annotations__", "__constants__", "extra_repr"}
_HARMLESS |= {"reset_parameters", "__repr__", "__firstlineno__", "__static_attributes__", "__annotate_func__"}


class Slot(NamedTuple):
    """A parameter that can be encoded rows."""

    module: nn.Module
    parameter: str
    target: type[Encoded]
    names: tuple[str, ...]
    """The module's dotted names: several where it is in the model several times."""
    lead: int = 1
    """How many dimensions count rows; the others lie inside a row."""
    transposed: bool = False

    @property
    def key(self) -> str:
        return join(self.names[0], self.parameter)

    def known_as(self) -> list[str]:
        """The names that rules are matched with: the module's, and the parameter's where it is not called `weight`."""
        if self.parameter == "weight":
            return list(self.names)
        return [name for module in self.names for name in (module, join(module, self.parameter))]

    def shape(self) -> torch.Size:
        """The shape of the weight row by row."""
        shape = self.float_weight().shape
        return torch.Size((shape[1], shape[0])) if self.transposed else shape

    def float_weight(self) -> nn.Parameter:
        weight = self.module._parameters[self.parameter]
        assert weight is not None
        return weight


class Skip(NamedTuple):
    """A weight that stays as it is."""

    name: str
    reason: str


class Weight(NamedTuple):
    """One Parameter, and every slot that holds it."""

    slots: list[Slot]

    def names(self) -> list[str]:
        """The keys of the weight in a state dict."""
        return [join(name, slot.parameter) for slot in self.slots for name in slot.names]


class Survey(NamedTuple):
    """The weights of a model that can be encoded, and those that cannot."""

    weights: list[Weight]
    skips: list[Skip]


def survey(model: nn.Module) -> Survey:
    """Every weight of a model that can be encoded, and every one that cannot."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    slots: dict[int, list[Slot]] = {}
    skips: dict[int, list[Skip]] = {}
    readers = _find_readers(model)
    for module, known in names.items():
        for parameter, weight in module._parameters.items():
            if weight is None or parameter == "bias" or (not is_lazy(weight) and weight.dim() < 2):
                continue
            slot = _slot(module, parameter, weight, tuple(known), readers.get((module, parameter), ""))
            if isinstance(slot, Slot):
                slots.setdefault(id(weight), []).append(slot)
            else:
                skips.setdefault(id(weight), []).append(Skip(join(known[0], parameter), slot))
    weights = []
    for identity, tied in slots.items():
        why = _why_not_tied(tied, skips.get(identity, []))
        if why:
            skips.setdefault(identity, []).extend(Skip(slot.key, why) for slot in tied)
        else:
            weights.append(Weight(tied))
    return Survey(weights, [skip for tied in skips.values() for skip in tied] + _without_parameter(names))


def join(module: str, parameter: str) -> str:
    """The key of a parameter in a state dict; the root module has the name ""."""
    return f"{module}.{parameter}" if module else parameter


def _slot(module: nn.Module, parameter: str, weight: Tensor, names: tuple[str, ...], reader: str) -> Slot | str:
    """The slot, or why there is none; `reader` is the class of a parent that reads the weight directly, or ""."""
    held = encoded_parameters(module).get(parameter)
    if held is not None:
        return f"already encoded, in {held.codec.spec}"
    why = _unfit(weight) or _changed(module)
    if why:
        return why
    if reader and (isinstance(module, tuple(TARGETS)) or _is_transposed_linear(module)):
        return direct_read(reader, parameter)
    if _is_transposed_linear(module) and parameter == "weight":
        return Slot(module, parameter, Linear, names, transposed=True)
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "max_norm changes rows as they are read, and encoded rows are not changed"
    for base, target in TARGETS.items():
        if isinstance(module, base):
            projections = (PACKED, *APART) if base is nn.MultiheadAttention else ("weight",)
            fits = parameter in projections or issubclass(base, nn.RNNBase)
            return Slot(module, parameter, target, names) if fits else "not a projection"
    return _expert_slot(module, parameter, weight, names)


def _expert_slot(module: nn.Module, parameter: str, weight: Tensor, names: tuple[str, ...]) -> Slot | str:
    kind = float_class_of(module)
    if kind.__module__.split(".")[0] == "torch":
        return f"torch.nn.{kind.__name__} has no encoded form"
    if weight.dim() != 3:
        return f"held by {kind.__name__} itself, where only 3-D weights have an encoded form"
    if min(weight.shape) < 2:
        return f"shape {list(weight.shape)} is no stack of matrices"
    if isinstance(module, Encoded):
        return Slot(module, parameter, type(module), names, lead=2)
    if kind.get_extra_state is not nn.Module.get_extra_state:
        return f"{kind.__name__} has an extra state of its own, where encoded modules say which codec their rows have"
    stacks = tuple(name for name, stack in module._parameters.items() if stack is not None and stack.dim() == 3)
    return Slot(module, parameter, experts_class(kind, stacks), names, lead=2)


def _unfit(weight: Tensor) -> str:
    """Why no codec takes this tensor."""
    if is_lazy(weight):
        return "not initialized yet: run one batch through the model first"
    if type(weight.data) is not Tensor:
        return f"a {type(weight.data).__name__}, not a plain tensor"
    if weight.layout != torch.strided:
        return f"{str(weight.layout).removeprefix('torch.')}, not dense"
    if weight.dtype not in checks.FLOATS:
        return f"{checks.dtype_name(weight.dtype)}, and codecs take float32, bfloat16, float16 or float64"
    return "" if weight.numel() else "no elements"


def _changed(module: nn.Module) -> str:
    """Why a module does not compute what its class of torch.nn does."""
    if is_parametrized(module):
        return "parametrized: call torch.nn.utils.parametrize.remove_parametrizations first"
    if "forward" in vars(module):
        return "forward was replaced on this instance (accelerate does that): quantize before"
    if isinstance(module, nn.RNNBase) and not module._parameters.keys() >= set(module._flat_weights_names):
        return COMPUTED
    for base in TARGETS:
        if isinstance(module, base) and not isinstance(module, Encoded):
            between = type(module).__mro__[: type(module).__mro__.index(base)]
            added = sorted({name for kind in between for name in vars(kind)} - _HARMLESS)
            if added:
                return f"{type(module).__name__} changes torch.nn.{base.__name__} ({', '.join(added)})"
    return ""


def direct_read(reader: str, parameter: str = "weight") -> str:
    """Why a weight that a parent module uses itself stays as it is: the parent would read rows as floats."""
    return f"the parent module {reader} reads `.{parameter}` directly instead of calling the layer"


def _find_readers(model: nn.Module) -> dict[tuple[nn.Module, str], str]:
    """Parameters that another module reads directly, with the class of that module."""
    readers = find_direct_reads(model)
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention) and _changed(module):  # torch's own code, in a subclass
            readers[module.out_proj, "weight"] = type(module).__name__
    return readers


def _is_transposed_linear(module: nn.Module) -> bool:
    """Whether a module is GPT-2's Conv1D; by its name, since transformers may not be installed."""
    return (type(module).__module__, type(module).__name__) == ("transformers.pytorch_utils", "Conv1D")


def _why_not_tied(slots: list[Slot], skips: list[Skip]) -> str:
    """Why a tied weight cannot be one set of rows for all that hold it."""
    if skips:
        return f"tied to {skips[0].name}, which cannot be encoded: {skips[0].reason}"
    first = slots[0]
    for other in slots[1:]:
        if (other.lead, other.transposed) != (first.lead, first.transposed):
            return f"tied between {first.key} and {other.key}, which would have different rows"
    return ""


def _without_parameter(names: dict[nn.Module, list[str]]) -> list[Skip]:
    """Skips for layers that could be encoded if their weight were a Parameter of theirs."""
    skips = []
    for module, known in names.items():
        several = isinstance(module, (nn.MultiheadAttention, nn.RNNBase))
        if isinstance(module, Encoded) or "weight" in module._parameters or several:
            continue
        if isinstance(module, tuple(TARGETS)):
            reason = _changed(module) or COMPUTED
            skips.append(Skip(join(known[0], "weight"), reason))
    return skips
