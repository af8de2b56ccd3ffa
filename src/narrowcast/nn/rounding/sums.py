"""Embeddings whose rows are added, as those of words, positions and types: each makes up for what the others have lost.

A table with few rows, such as the one of token types, adds the same error to every token, and no layer behind it tells
that error from a signal. So tables are rounded one after the other, those with the fewest rows first. A table is
rounded to its own rows plus what the tables before it have lost where the data looks its rows up, on average. Rows that
the data seldom or never looks up take the average over all lookups (`SELDOM`).

Tables are found by what is added while batches run. A table that is also looked up elsewhere, or is tied to a layer
that multiplies, is rounded as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from narrowcast.nn.survey import Weight

SELDOM = 16
"""The average over all lookups counts as much as so many lookups of a row."""
Lookups = dict[str, Tensor]
"""The rows that tables look up, by the tables' keys: shapes that broadcast."""
ADDITIONS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__, Tensor.__radd__)


def round_added_tables(
    rest: list[Weight], runs: Sequence[Callable[[], None]], round_weight: Callable[..., None]
) -> None:
    """Round the embeddings whose rows are added, and take them from the list. A run takes a batch through the model."""
    tables = [weight for weight in rest if nn.Embedding in [slot.target.float_class for slot in weight.slots]]
    if len(tables) < 2:
        return
    sums: list[Lookups] = []
    for run in runs:
        with watching_sums(tables) as found:
            run()
        sums += found

    def round_table(weight: Weight, target: Tensor | None) -> Tensor:
        round_weight(weight, None, target)
        module: Any = weight.slots[0].module
        decoded: Tensor = module.decoded(torch.float32)
        return decoded

    for added in added_tables(tables, sums):
        round_added(added, sums, round_table)
        for weight in added:
            rest.remove(weight)


@contextmanager
def watching_sums(tables: Sequence[Weight]) -> Iterator[list[Lookups]]:
    """The sums of rows of several tables, in the order in which they are made."""
    watch = _Watch()
    modules = {id(slot.module): (table.slots[0].key, slot.module) for table in tables for slot in table.slots}
    hooks = []
    for key, module in modules.values():
        if isinstance(module, nn.Embedding):
            hooks.append(module.register_forward_hook(lambda _, args, rows, key=key: watch.look_up(key, args, rows)))
    sums: list[Lookups] = []
    try:
        with watch:
            yield sums
    finally:
        for hook in hooks:
            hook.remove()
        sums += watch.sums()


class _Watch(TorchFunctionMode):
    """Follows the rows of tables through additions."""

    def __init__(self) -> None:
        super().__init__()
        self._terms: dict[int, tuple[Tensor, Lookups]] = {}  # the tensor stays: another one could take its id

    def look_up(self, key: str, args: tuple[Any, ...], rows: Tensor) -> None:
        if args and isinstance(args[0], Tensor):
            self._terms[id(rows)] = rows, {key: args[0]}

    def sums(self) -> list[Lookups]:
        """The rows that were added, and those that were not."""
        return [lookups for _, lookups in self._terms.values()]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ADDITIONS and not kwargs and len(args) == 2 and isinstance(result, Tensor):
            terms = [self._terms.get(id(term)) for term in args]
            one, other = terms
            if one and other and one[0].shape[-1] == other[0].shape[-1] and not one[1].keys() & other[1].keys():
                for term in args:
                    del self._terms[id(term)]
                self._terms[id(result)] = result, {**one[1], **other[1]}
        return result


def added_tables(tables: Sequence[Weight], sums: Sequence[Lookups]) -> list[list[Weight]]:
    """The tables whose rows are only ever added to each other's, two or more, those with the fewest rows first."""
    kinds = Counter(frozenset(lookups) for lookups in sums)
    alone = {key for key in (table.slots[0].key for table in tables) if sum(key in kind for kind in kinds) == 1}
    groups = []
    for kind in kinds:
        members = [table for table in tables if table.slots[0].key in kind & alone]
        if len(kind) > 1 and len(members) == len(kind):
            groups.append(sorted(members, key=lambda table: table.slots[0].float_weight().shape[0]))
    return groups


def round_added(
    tables: Sequence[Weight], sums: Sequence[Lookups], round_table: Callable[[Weight, Tensor | None], Tensor]
) -> None:
    """Round tables whose rows are added, each with `round_table(weight, target)`: to `target`, or to itself for None.
    It gives what the rounded table decodes to.
    """
    keys = {table.slots[0].key for table in tables}
    own = [lookups for lookups in sums if keys == lookups.keys()]
    lost: dict[str, Tensor] = {}
    for table in tables:
        slot = table.slots[0]
        floats = slot.float_weight().detach().float()
        target = None
        if lost and len(table.slots) == 1:
            target = floats + _lost_at(slot.key, floats, lost, own)
            padding = getattr(slot.module, "padding_idx", None)
            if padding is not None:
                target[padding] = floats[padding]
        lost[slot.key] = floats - round_table(table, target)


def _lost_at(key: str, floats: Tensor, lost: Mapping[str, Tensor], sums: Sequence[Lookups]) -> Tensor:
    """What the other tables have lost where each row of a table is looked up, on average: [rows, width]."""
    total, count = torch.zeros_like(floats), floats.new_zeros(len(floats), 1)
    for lookups in sums:
        places = torch.broadcast_tensors(*(lookups[name].to(floats.device) for name in (key, *lost)))  # type: ignore[no-untyped-call]
        own, *others = (rows.reshape(-1).long() for rows in places)
        total.index_add_(0, own, sum((table[rows] for table, rows in zip(lost.values(), others, strict=True))))  # type: ignore[arg-type]
        count.index_add_(0, own, count.new_ones(len(own), 1))
    mean = total.sum(0) / count.sum().clamp(min=1.0)
    return (total + SELDOM * mean) / (count + SELDOM)
