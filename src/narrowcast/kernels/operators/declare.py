"""Torch operators, declared from annotated functions.

An operator's schema is written out of the annotations of a function. A `Recipe` travels as plain numbers and one
tensor, so that torch.compile, torch.export and the profiler see ordinary operators: `Schema.spread` takes it apart for
a call, `Schema.gather` puts it together for the function. One implementation serves CPU and CUDA; a fake says what
comes out for tensors without memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.library import Library, register_fake

from narrowcast.kernels.layout import Format, Recipe

LIBRARY = Library("narrowcast", "DEF")  # type: ignore[no-untyped-call]

TYPES = {
    "Tensor": "Tensor {}",
    "Tensor | None": "Tensor? {}",
    "Count": "SymInt {}",
    "int": "int {}",
    "float": "float {}",
    "bool": "bool {}",
    "Sequence[int]": "int[] {}",
    "torch.dtype": "ScalarType {}",
    "Recipe": "int[] format, float peak, Tensor? table",
}
RESULTS = {"None": "()", "Tensor": "Tensor", "tuple[Tensor, Tensor]": "(Tensor, Tensor)"}


class Schema(NamedTuple):
    """The arguments of an operator, and which of them is a `Recipe`."""

    arguments: tuple[str, ...]
    recipe: int | None
    result: str

    def spread(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """A function's arguments as the operator takes them."""
        at = self.recipe
        return values if at is None else (*values[:at], *values[at], *values[at + 1 :])

    def gather(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """An operator's arguments as the function takes them."""
        at = self.recipe
        if at is None:
            return values
        format, peak, table = values[at : at + 3]
        return (*values[:at], Recipe(Format(*format), peak, table), *values[at + 3 :])


def schema_of(function: Callable[..., Any]) -> Schema:
    """What the annotations of a function say; they must be those of `TYPES` and `RESULTS`, word for word."""
    kinds = dict(function.__annotations__)
    result = RESULTS[kinds.pop("return")]
    place = list(kinds.values()).index("Recipe") if "Recipe" in kinds.values() else None
    return Schema(tuple(TYPES[kind].format(name) for name, kind in kinds.items()), place, result)


def declare(name: str, schema: Schema, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define `torch.ops.narrowcast.<name>`; both functions take the arguments that `schema` was written out of."""
    LIBRARY.define(f"{name}({', '.join(schema.arguments)}) -> {schema.result}")  # type: ignore[no-untyped-call]

    def run(*values: Any) -> Any:
        return implementation(*schema.gather(values))

    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, run, device)  # type: ignore[no-untyped-call]
    register_fake(f"narrowcast::{name}", lambda *values: fake(*schema.gather(values)), lib=LIBRARY)
