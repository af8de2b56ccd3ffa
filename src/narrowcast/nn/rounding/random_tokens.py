"""What the inputs of layers look like, without data: random tokens through the model itself.

A norm's weights, the sizes of values and the gates of a feed-forward make some inputs of a layer much larger than
others, whatever the tokens say. So a search lets errors of a column count by the mean square of its input, over BATCH
sequences of LENGTH tokens that are drawn uniformly from the largest embedding, with a seed of their own. On a model
that takes no tokens columns count alike.

Tables of embeddings whose rows are added make up for each other, as they do on data (sums.py).

The pass changes nothing: modes, buffers, attributes and the state of random numbers are as before. If the model cannot
run, the report has the reason; nothing fails. In a process group of several ranks it does not run, because a model may
wait for other ranks in its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from narrowcast.codecs import Codec
from narrowcast.nn.modules.base import float_class_of
from narrowcast.nn.rounding.batches import device_of, evaluating
from narrowcast.nn.rounding.moments import InputMoments
from narrowcast.nn.rounding.recording import attention_calls_projections, recording, why_no_moments
from narrowcast.nn.rounding.sums import Lookups, added_tables, round_added, watching_sums
from narrowcast.nn.rounding.undo import Snapshot
from narrowcast.nn.survey import Weight

BATCH, LENGTH = 16, 16
SEED = 0x5EED


class InputSquares(InputMoments):
    """The sums of the squares of inputs alone: [groups, k]."""

    def add(self, x: Tensor) -> None:
        squares = self._grouped(x).square().sum(1).double()
        self.total = squares if self.total is None else self.total.add_(squares)
        self.counts = [count + x.numel() for count in self.counts]

    def add_to_group(self, group: int, x: Tensor) -> None:
        squares = x.detach().float().reshape(-1, x.shape[-1]).square().sum(0).double()
        if self.total is None:
            self.total = squares.new_zeros(self.groups, x.shape[-1])
        self.total[group] += squares
        self.counts[group] += x.numel()


class Guess(NamedTuple):
    """What is known of a model's weights without data."""

    squares: Mapping[str, InputMoments] = {}
    """By the key of the weight."""
    targets: Mapping[str, Tensor] = {}
    """What to round a table to, where that is not the table itself."""
    why_not: str = ""
    """Why nothing is known."""

    def of(self, weight: Weight) -> tuple[InputMoments | None, Tensor | None, str]:
        """The squares of a weight's inputs, what to round it to, and why its columns count alike where they do."""
        key = weight.slots[0].key
        alike = self is not NOTHING and key not in self.squares and not why_no_moments(weight)
        note = f"columns count alike: {self.why_not or 'random tokens do not reach it'}" if alike else ""
        return self.squares.get(key), self.targets.get(key), note


NOTHING = Guess()
"""For roundings that do not ask."""


def guess_inputs(model: nn.Module, choices: Sequence[tuple[Weight, Codec]]) -> Guess:
    """Run random tokens through a model whose weights are to be encoded."""
    why_not = _why_not(model)
    if why_not:
        return Guess(why_not=why_not)
    weights, device, snapshot = [weight for weight, _ in choices], device_of(model), Snapshot(model)
    tables = [weight for weight in weights if isinstance(weight.slots[0].module, nn.Embedding)]
    tokens = _tokens(model).to(device)
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            evaluating(model),
            attention_calls_projections(weights),
            recording(weights, InputSquares) as squares,
            watching_sums(tables) as sums,
            _InRange(),
        ):
            model(tokens)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        return Guess(why_not=f"the model does not run on random tokens ({type(error).__name__}: {first[:120]})")
    finally:
        snapshot.restore()
    known = {key: own for key, own in squares.items() if own.total is not None and own.finite()}
    return Guess(known, _targets(choices, tables, sums))


def _why_not(model: nn.Module) -> str:
    if not _tables(model):
        return "the model has no embedding to draw tokens from"
    if any(parameter.is_meta for parameter in model.parameters()):
        return "the model is on the meta device"
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return "a forward pass may wait for other ranks"
    return ""


def _tables(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if issubclass(float_class_of(module), nn.Embedding)]


def _tokens(model: nn.Module) -> Tensor:
    rows = max(table.num_embeddings for table in _tables(model))
    generator = torch.Generator("cpu").manual_seed(SEED)
    return torch.randint(rows, (BATCH, LENGTH), dtype=torch.int64, device="cpu", generator=generator)


def _targets(
    choices: Sequence[tuple[Weight, Codec]], tables: Sequence[Weight], sums: Sequence[Lookups]
) -> dict[str, Tensor]:
    codecs = {weight.slots[0].key: codec for weight, codec in choices}
    targets: dict[str, Tensor] = {}

    def round_table(weight: Weight, target: Tensor | None) -> Tensor:
        slot = weight.slots[0]
        if target is not None:
            targets[slot.key] = target
        floats = slot.float_weight().detach() if target is None else target
        return codecs[slot.key].decode(codecs[slot.key].encode_searched(floats), floats.shape[-1])

    for added in added_tables(tables, sums):
        round_added(added, sums, round_table)
    return targets


class _InRange(TorchFunctionMode):
    """Refuses tokens that a table does not have: a kernel on a GPU that meets one leaves the whole process broken."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.embedding and len(args) >= 2:
            _check(args[0], args[1])
        elif func is Tensor.__getitem__ and isinstance(args[1], Tensor):
            _check(args[1], args[0])
        return func(*args, **(kwargs or {}))


def _check(places: Tensor, table: Tensor) -> None:
    indices = not places.is_floating_point() and places.dtype != torch.bool
    if indices and places.numel() and int(places.max()) >= table.shape[0]:
        raise IndexError(f"a token is out of range for a table of {table.shape[0]} rows")
