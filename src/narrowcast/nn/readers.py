"""Which weights a model reads past their modules.

A model may use a layer's weight without calling the layer: to multiply with it in a way of its own, or only to cast its
input to `self.proj.weight.dtype`. Encoded rows would break it, and a cast to uint8 destroys activations. So the code of
a model's own classes is searched for such reads: `forward` and the methods that it may call, for chains of attributes
that lead from the module to a parameter of one of its children. Where a read hides behind a variable or an index, it is
not found, and the layer refuses what it is given instead.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import nn

HARMLESS = {"device", "is_cuda", "requires_grad"}
"""What may be asked of a weight that is rows: the answer is the same."""


def read_past_module(model: nn.Module) -> dict[tuple[nn.Module, str], str]:
    """The parameters that a parent's code reads itself, each with the name of the class that does."""
    found: dict[tuple[nn.Module, str], str] = {}
    chains: dict[type[nn.Module], list[list[str]]] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in chains:
            chains[kind] = [chain for code in _codes(kind) for chain in _chains(code)]
        for chain in chains[kind]:
            for owner, parameter in _parameters_on(module, chain):
                found.setdefault((owner, parameter), kind.__name__)
    return found


def _parameters_on(module: nn.Module, chain: list[str]) -> Iterator[tuple[nn.Module, str]]:
    """The parameters of children that a chain of attributes, followed from `module`, passes."""
    for place, name in enumerate(chain):
        child = module._modules.get(name)
        if child is None:
            if place and name in module._parameters and not HARMLESS.intersection(chain[place + 1 : place + 2]):
                yield module, name
            return
        module = child


def _codes(kind: type[nn.Module]) -> list[CodeType]:
    """The code of `forward` and of every method that it may call, of classes that are not torch's."""
    codes: dict[str, CodeType] = {}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        for base in kind.__mro__:
            key, member = f"{base.__module__}.{base.__qualname__}.{name}", vars(base).get(name)
            if key in codes or base.__module__.split(".")[0] == "torch":
                continue
            member = member.fget if isinstance(member, property) else member
            function = inspect.unwrap(member) if callable(member) else None
            if isinstance(function, FunctionType):
                codes[key] = function.__code__
                waiting += [other for code in _nested(function.__code__) for other in code.co_names]
    return [code for outer in codes.values() for code in _nested(outer)]


def _nested(code: CodeType) -> Iterator[CodeType]:
    """A function's code, with the comprehensions and functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _chains(code: CodeType) -> Iterator[list[str]]:
    """The names in every `x.a.b.c`, whatever x is."""
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(str(instruction.argval))
        elif chain and instruction.opname != "EXTENDED_ARG":  # which stands before a name in a long function
            yield chain
            chain = []
    if chain:
        yield chain
