"""Derivatives of operators: backward, forward, and under the transforms of torch.func.

`torch.library.register_autograd` knows backward passes alone: torch.func.grad is refused there, and a forward-mode
tangent is dropped in silence. `differentiable` gives an operator a kernel of its own for both modes and any nesting of
torch.func's grad, vjp, jvp and jacobians. A rule is a `Rule`: three functions.

`batched` gives it a rule for torch.func.vmap: a function that takes a batch at once where it can, else one call each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function  # type: ignore[attr-defined]
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction
from torch.library import register_vmap
from torch.utils._pytree import tree_map

from narrowcast.kernels.operators.declare import LIBRARY


class Rule(NamedTuple):
    """How an operator is differentiated. Functions take a context, as those of torch.autograd.Function do."""

    remember: Callable[..., None]
    """(ctx, inputs, output): keep what the other two need, with `remember_tensors`."""
    gradients: Callable[..., Any]
    """(ctx, *grads): the gradient of each input, None where there is none; `ctx.wanted` says which are asked for."""
    tangents: Callable[..., Any]
    """(ctx, *tangents): the tangents of the outputs; a tangent of an input is None where it has none."""


def remember_tensors(ctx: Any, *tensors: Tensor | None) -> None:
    """For both modes: they lie in `ctx.saved_tensors`."""
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def differentiable(name: str, rule: Rule) -> None:
    """Give the operator `name` its derivatives."""
    operator = getattr(torch.ops.narrowcast, name).default

    def below(keyset: Any, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    class Derivative(_SingleLevelFunction):  # what torch itself makes of a Function for each transform
        _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)

        @staticmethod
        def forward(keyset: Any, *arguments: Any) -> Any:
            # A transform around this one, which torch has switched off for the body of a Function, is to see it too.
            with torch.enable_grad(), _set_fwd_grad_enabled(True):
                return below(keyset, *arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.set_materialize_grads(True)
            rule.remember(ctx, inputs[1:], output)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            ctx.wanted = ctx.needs_input_grad[1:]
            return None, *rule.gradients(ctx, *grads)

        @staticmethod
        def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
            return rule.tangents(ctx, *tangents[1:])

    Derivative.__name__ = Derivative.__qualname__ = f"narrowcast_{name}"

    def kernel(keyset: Any, *arguments: Any) -> Any:
        wanted = torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)
        if not wanted and forward_ad._current_level < 0:
            return below(keyset, *arguments)
        # Torch calls this kernel once for each transform, so that each is one level of its own.
        with enable_single_level_autograd_function():
            return Derivative.apply(keyset, *arguments)  # type: ignore[attr-defined]

    LIBRARY.impl(name, kernel, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]


def batched(name: str, at_once: Callable[..., Any] | None) -> None:
    """Let vmap take the operator `name`.

    `at_once(arguments)` gets the arguments, of which the first alone has a batch, in its first dimension, and returns
    the result with the batch there; None: each element of a batch is a call of its own.
    """
    operator = getattr(torch.ops.narrowcast, name).default

    def rule(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        first, *rest = arguments
        if at_once is not None and all(dim is None or isinstance(dim, list) for dim in dims[1:]):
            result = at_once(first.movedim(dims[0], 0), *rest)
        else:
            calls = []
            for place in range(info.batch_size):
                some = [
                    argument.select(dim, place) if isinstance(argument, Tensor) and dim is not None else argument
                    for argument, dim in zip(arguments, dims, strict=True)
                ]
                calls.append(operator(*some))
            one = isinstance(calls[0], Tensor)
            result = torch.stack(calls) if one else tuple(torch.stack(some) for some in zip(*calls, strict=True))
        return result, tree_map(lambda _: 0, result)

    register_vmap(f"narrowcast::{name}", rule, lib=LIBRARY)
