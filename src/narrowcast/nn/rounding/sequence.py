"""Which weights are rounded together, on which inputs, in which order.

A model is rounded from its inputs to its outputs, and every weight on the inputs that it will really get: those that
the weights before it, rounded already, give. A *step* is a set of weights that are rounded together:

- what runs before the first stack of blocks;
- each block of a stack: the children of a ModuleList or Sequential that are of one class, such as decoder layers;
- everything else, at the end.

The inputs of a stack's blocks are captured once. From then on only one block runs at a time. Its weights are rounded in
the order in which it uses them, those that read the same input together. Beside it runs its twin, with the float
weights and on the unrounded model's inputs: so that a layer can make up for what the layers before it have lost. Hidden
states, of both, wait on the CPU in the dtype that the model gives them. Where a block does not simply take what the
block before it returns, the whole model runs for each block instead: slower, and always right.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowcast.errors import CalibrationError
from narrowcast.nn.modules.base import copy_modules, float_class_of
from narrowcast.nn.rounding.batches import UNCHANGED, device_of, move, padding_mask
from narrowcast.nn.rounding.moments import InputMoments
from narrowcast.nn.rounding.passes import run_up_to
from narrowcast.nn.rounding.recording import keep_tokens, keeping_inputs, recording, why_no_moments
from narrowcast.nn.rounding.residuals import wanted_output, watching_calls
from narrowcast.nn.rounding.sums import round_added_tables
from narrowcast.nn.survey import Weight

CPU = torch.device("cpu")
Round = Callable[..., None]
"""Rounds one weight, given its moments or None, and puts its rows into the model. A third argument is what to round it
to, where that is not the weight itself."""


class Stack(NamedTuple):
    """Blocks, and the states that enter them in the unrounded model: none where blocks do not simply chain."""

    blocks: list[nn.Module]
    exact: list[Tensor]

    @classmethod
    def of(cls, model: nn.Module, blocks: list[nn.Module], batches: Sequence[Any]) -> Stack:
        captured = _capture(model, blocks, batches)
        return cls(blocks, [] if captured is None else captured[0])


class Call(NamedTuple):
    """The arguments of one call of a block, without the first, its hidden states."""

    rest: tuple[Any, ...]
    kwargs: dict[str, Any]


def round_in_order(
    model: nn.Module, weights: Sequence[Weight], batches: Sequence[Any], round_weight: Round, finished: Container[str]
) -> None:
    """Round all weights, each on inputs that come from rounded weights.

    What is `finished` has rows already, which `round_weight` puts into the model: its moments are not recorded.
    """
    stacks = [Stack.of(model, blocks, batches) for blocks in find_stacks(model, weights)]
    blocks = [block for stack in stacks for block in stack.blocks]
    inside = {weight.slots[0].key for block in blocks for weight in _of_block(block, weights)}
    rest = [weight for weight in weights if weight.slots[0].key not in inside]  # some are tied between blocks
    first = blocks[0] if blocks else None
    runs = [partial(run_up_to, model, batch, number, stop_at=first) for number, batch in enumerate(batches)]
    round_added_tables(rest, runs, round_weight)
    for weight in [weight for weight in rest if why_no_moments(weight)]:
        round_weight(weight, None)
        rest.remove(weight)
    if stacks:
        with recording(rest) as moments:
            for batch, run in zip(batches, runs, strict=True):
                keep_tokens(moments, padding_mask(batch))
                run()
        before = [weight for weight in rest if moments[weight.slots[0].key].count]
        for weight in before:
            round_weight(weight, _checked(weight, moments))
            rest.remove(weight)
    work = _Work(model, batches, round_weight, finished)
    for stack in stacks:
        _round_stack(work, stack, weights)
    _round_on_model(work, rest)


class _Work(NamedTuple):
    """What is rounded on what."""

    model: nn.Module
    batches: Sequence[Any]
    round_weight: Round
    finished: Container[str]

    def round(self, weights: Sequence[Weight], record: Callable[[], dict[str, InputMoments]]) -> None:
        """Round weights on the moments that `record` gives. Nothing is recorded where all of them are finished."""
        done = all(weight.slots[0].key in self.finished for weight in weights)
        moments = {} if done else record()
        for weight in weights:
            self.round_weight(weight, None if done or why_no_moments(weight) else _checked(weight, moments))


def find_stacks(model: nn.Module, weights: Sequence[Weight]) -> list[list[nn.Module]]:
    """The stacks of blocks of a model, the outermost ones, in the order of their names."""
    holders = {id(slot.module) for weight in weights for slot in weight.slots}
    stacks: list[list[nn.Module]] = []
    inside: set[int] = set()
    for module in model.modules():
        children = list(module.children())
        if id(module) in inside or not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(children) < 2:
            continue
        alike = len({float_class_of(child) for child in children}) == 1 and len(set(children)) == len(children)
        holding = [any(id(part) in holders for part in child.modules()) for child in children]
        if alike and all(holding) and not any(id(child) in holders for child in children):
            stacks.append(children)
            inside |= {id(part) for child in children for part in child.modules()}
    return stacks


def _of_block(block: nn.Module, weights: Sequence[Weight]) -> list[Weight]:
    parts = {id(module) for module in block.modules()}
    return [weight for weight in weights if all(id(slot.module) in parts for slot in weight.slots)]


def _round_on_model(work: _Work, weights: Sequence[Weight]) -> None:
    """Round weights on the inputs that the whole model gives them as it is now."""

    def record() -> dict[str, InputMoments]:
        with recording(weights) as moments:
            for number, batch in enumerate(work.batches):
                keep_tokens(moments, padding_mask(batch))
                run_up_to(work.model, batch, number)
        return moments

    work.round(weights, record)


def _round_stack(work: _Work, stack: Stack, weights: Sequence[Weight]) -> None:
    captured = _capture(work.model, stack.blocks, work.batches)
    if captured is None:
        for block in stack.blocks:
            _round_on_model(work, _of_block(block, weights))
        return
    states, calls = captured
    device, masks = device_of(work.model), [padding_mask(batch) for batch in work.batches]
    for place, block in enumerate(stack.blocks):
        run = _Block(block, states, stack.exact, calls[place], device)
        run.masks = masks
        own = _of_block(block, weights)
        for step in run.steps(own):
            work.round(step, partial(run.record, step))
        if place + 1 < len(stack.blocks):
            run.advance()


class _Block:
    """One block of a stack: its inputs in the model as it is, in the unrounded model, and its other arguments."""

    def __init__(
        self, block: nn.Module, states: list[Tensor], exact: list[Tensor], calls: list[Call], device: torch.device
    ) -> None:
        self.block, self.states, self.calls, self.device = block, states, calls, device
        self.exact = exact
        self.masks: list[Tensor | None] = [None] * len(states)
        self.twin = _with_own_parameters(copy_modules(block))  # the float weights, in the same memory
        self.names = {id(module): name for name, module in block.named_modules()}

    def steps(self, weights: Sequence[Weight]) -> list[list[Weight]]:
        """Weights in the order in which the block uses them; those that read the same input together."""
        order: dict[str, int] = {}
        inputs: list[Tensor] = []
        with keeping_inputs(self._twins(weights)) as kept:
            hook_order: list[str] = []
            hooks = [
                twin.register_forward_pre_hook(lambda *_, name=name: hook_order.append(name))
                for name, twin in self._twins(weights).items()
            ]
            _call(self.twin, self.exact[0], self.calls[0], self.device)
            for hook in hooks:
                hook.remove()
            for name in hook_order:
                x = kept[name][0]
                place = next((i for i, other in enumerate(inputs) if other is x), len(inputs))
                if place == len(inputs):
                    inputs.append(x)
                order.setdefault(name, place)
        last = len(inputs)
        places = {weight.slots[0].key: order.get(weight.slots[0].key, last) for weight in weights}
        return [
            [weight for weight in weights if places[weight.slots[0].key] == place]
            for place in sorted({*places.values()})
        ]

    def record(self, weights: Sequence[Weight]) -> dict[str, InputMoments]:
        """The moments of weights over all batches, with the outputs that are wanted of them."""
        twins = self._twins(weights)
        own = {weight.slots[0].key: weight.slots[0].module for weight in weights if weight.slots[0].key in twins}
        with recording(weights) as moments:
            for states, unrounded, call, mask in zip(self.states, self.exact, self.calls, self.masks, strict=True):
                keep_tokens(moments, mask)
                with watching_calls(twins) as exact:
                    _call(self.twin, unrounded, call, self.device)
                with watching_calls(own) as rounded:
                    _call(self.block, states, call, self.device)
                for key in own:
                    for now, before in zip(rounded[key], exact[key], strict=True):
                        moments[key].add_wanted(now.x, wanted_output(now, before))
        return moments

    def advance(self) -> None:
        """Replace the states that enter this block by those that leave it."""
        for number, call in enumerate(self.calls):
            self.exact[number] = _first(_call(self.twin, self.exact[number], call, self.device)).to(CPU)
            self.states[number] = _first(_call(self.block, self.states[number], call, self.device)).to(CPU)

    def _twins(self, weights: Sequence[Weight]) -> dict[str, nn.Module]:
        """The modules of the twin that hold these weights; not of experts and of attention, which are not compared."""
        slots = [weight.slots[0] for weight in weights if len(weight.slots) == 1 and not why_no_moments(weight)]
        return {
            slot.key: self.twin.get_submodule(self.names[id(slot.module)])
            for slot in slots
            if slot.parameter == "weight"
        }


def _capture(
    model: nn.Module, stack: Sequence[nn.Module], batches: Sequence[Any]
) -> tuple[list[Tensor], list[list[Call]]] | None:
    """The hidden states that enter a stack, and the other arguments of each block's calls, a batch each.

    None if blocks are not called once each, in order, on what the block before them returned.
    """
    hidden: list[Tensor] = []
    calls: list[list[Call]] = [[] for _ in stack]
    places = {block: place for place, block in enumerate(stack)}
    chained, expected, last = True, 0, None

    def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal chained, expected
        place = places[block]
        if place != expected or not args or not isinstance(args[0], Tensor) or (place and args[0] is not last):
            chained = False
            return
        if place == 0:
            hidden.append(args[0].to(CPU))
        calls[place].append(Call(move(args[1:], CPU), move(dict(kwargs), CPU)))
        expected = place + 1

    def after(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nonlocal last
        last = _first(output)

    hooks = [block.register_forward_pre_hook(before, with_kwargs=True) for block in stack]
    hooks += [block.register_forward_hook(after) for block in stack]
    try:
        for number, batch in enumerate(batches):
            expected, last = 0, None
            run_up_to(model, batch, number)
            chained = chained and expected == len(stack)
            if not chained:
                return None
    finally:
        for hook in hooks:
            hook.remove()
    return hidden, calls


def _call(block: nn.Module, hidden: Tensor, call: Call, device: torch.device) -> Any:
    return block(hidden.to(device), *move(call.rest, device), **move(call.kwargs, device))


def _with_own_parameters(block: nn.Module) -> nn.Module:
    """Parameters of its own that hold the same memory. So a float weight that is moved out of a GPU's memory once it is
    rounded (resume.py) stays there for the block's twin until the block is done.
    """
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if type(parameter) is nn.Parameter:
                module._parameters[name] = nn.Parameter(parameter.data, requires_grad=False)
    return block


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, (tuple, list)) and output else output


def _checked(weight: Weight, moments: dict[str, InputMoments]) -> InputMoments:
    key = weight.slots[0].key
    if not moments[key].finite():
        raise CalibrationError(
            f"data: the inputs of {key} hold an infinity or a NaN, or are too large to square. Usually a batch does, "
            f"a weight before it is not finite, or the model overflows in its dtype. {UNCHANGED}"
        )
    return moments[key]
