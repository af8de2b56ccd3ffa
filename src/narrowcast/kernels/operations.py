"""Every operation, declared once.

An `Operation` is a name, its meaning (a function of reference/) and its check (a function of arguments.py), which take
the same arguments. The rest derives from these: the methods of `Kernel` and the reference kernel (contract.py), the
schemas of torch's operators, their fakes, and the functions that codecs call (operators/).

To add an operation, write the two functions, declare it here, and give every machine a method for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec

from torch import Tensor

from narrowcast.kernels import arguments, reference
from narrowcast.kernels.arguments import Result

P = ParamSpec("P")


@dataclass(frozen=True)
class Operation(Generic[P]):
    """What one operation is called, means and takes.

    It has two forms: one returns a new tensor, and one writes into `out`, which stands before the other arguments.
    """

    name: str
    meaning: Callable[P, Tensor]
    check: Callable[P, Result]
    sized_by_out: bool = False
    """The second and third arguments are `numel` and `dtype`, which the form with `out` reads from it."""

    def without_sizes(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of the form that returns a tensor, as the form with `out` takes them."""
        return (values[0], *values[3:]) if self.sized_by_out else values

    def with_sizes(self, out: Tensor, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inverse of `without_sizes`."""
        if not self.sized_by_out:
            return values
        shape = out.shape
        return (values[0], shape[-1] if shape else 1, out.dtype, *values[1:])


ENCODE = Operation("encode", reference.encode, arguments.encode)
ENCODE_SEARCHED = Operation("encode_searched", reference.encode_searched, arguments.encode_searched)
DECODE = Operation("decode", reference.decode, arguments.decode, sized_by_out=True)
DECODE_SUM = Operation("decode_sum", reference.decode_sum, arguments.decode_sum, sized_by_out=True)
DECODE_SUM_ENCODE = Operation("decode_sum_encode", reference.decode_sum_encode, arguments.decode_sum_encode)
LINEAR = Operation("linear", reference.linear, arguments.linear)
INTEGER_LINEAR = Operation("integer_linear", reference.integer_linear, arguments.integer_linear)
INTEGER_CONV = Operation("integer_conv", reference.integer_conv, arguments.integer_conv)
FAKE_QUANTIZE = Operation("fake_quantize", reference.fake_quantize, arguments.fake_quantize)

OPERATIONS = (
    *(ENCODE, ENCODE_SEARCHED, DECODE, DECODE_SUM, DECODE_SUM_ENCODE),
    *(LINEAR, INTEGER_LINEAR, INTEGER_CONV, FAKE_QUANTIZE),
)
"""All but two: `fake_quantize_backward` has two results, `adamw` changes three tensors. contract.py spells them out."""
