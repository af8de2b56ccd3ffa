"""Which weights a parent module reads directly instead of calling the layer that holds them.

A model may use `self.proj.weight` without calling `self.proj`: to multiply with it, or to cast its input to
`self.proj.weight.dtype`. Encoded rows would break it, and a cast to uint8 destroys activations. Such weights have to be
known before they are encoded, and `quantize_` has no inputs to run the model with: nothing can be traced. So the search
is static. It reads what Python compiled of the model's own classes: of `forward`, and of every method and property that
`forward` may use. A read is an unbroken chain of attributes, `x.a.b.weight`, that leads from the module to a parameter
of one of its children. Compiled code is there for every function; source is not (interactive sessions, `exec`).

tests/nn/test_direct_reads.py proves it with a probe that notes the real reads of real runs: transformers models that
cast to a weight's dtype (T5, ViT), models that do not (Llama, BERT, GPT-2 with its tied head).

- Code of torch itself is not searched. Where torch reads its children's weights, the library knows each case:
  nn.MultiheadAttention reads `out_proj` (modules/attention.py replaces it), and nn.TransformerEncoderLayer's fast path
  reads all weights (modules/fast_path.py switches it off).
- A read through a variable or an index (`w = self.layers[0]; w.weight`) is not found. The layer then refuses the uint8
  input, or torch the product with bytes: an error with the reason, not a wrong result.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import nn

HARMLESS = {"device", "is_cuda", "requires_grad"}
"""Attributes of a weight that are the same for rows: reading them does no harm."""


def find_direct_reads(model: nn.Module) -> dict[tuple[nn.Module, str], str]:
    """The parameters that a parent's code reads itself, each with the name of the parent's class."""
    readers: dict[tuple[nn.Module, str], str] = {}
    chains: dict[type[nn.Module], list[list[str]]] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in chains:
            chains[kind] = [chain for code in _codes(kind) for chain in _chains(code)]
        for chain in chains[kind]:
            for owner, parameter in _parameters_on(module, chain):
                readers.setdefault((owner, parameter), kind.__name__)
    return readers


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
