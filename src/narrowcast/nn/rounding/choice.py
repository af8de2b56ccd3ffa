"""The rounding that a caller asked for, and the one that a weight gets.

"gptq" needs inputs of a weight. Where there are none, or too few, the weight is rounded by search, and the report has
the reason: nothing falls back silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from narrowcast.codecs import Codec
from narrowcast.codecs.payload import EncodedRows
from narrowcast.errors import SpecError
from narrowcast.kernels.reference.search import GAIN
from narrowcast.nn.rounding.gptq import FEWEST, GPTQ
from narrowcast.nn.rounding.moments import InputMoments
from narrowcast.nn.rounding.nearest import round_to_nearest
from narrowcast.nn.rounding.search import round_by_search
from narrowcast.nn.survey import Weight

NAMED: dict[str, Any] = {"nearest": round_to_nearest, "search": round_by_search, "gptq": GPTQ()}


@dataclass(frozen=True)
class Chosen:
    """A rounding, and what it is called in reports."""

    name: str
    rounding: Any
    needs_data: bool

    @property
    def searches(self) -> bool:
        return self.rounding is round_by_search

    @property
    def takes_data(self) -> bool:
        """Whether data changes rows."""
        return self.needs_data or self.searches

    def rows(
        self, weight: Tensor, codec: Codec, lead: int, moments: InputMoments | None, why_not: str, gain: float = GAIN
    ) -> tuple[EncodedRows, str, str]:
        """The rows of a weight, the name of the rounding that made them, and why it is another than was asked for."""
        if self.needs_data and (moments is None or not moments.count):
            return round_by_search(weight, codec, lead, gain=gain), "search", why_not or "no batch reached it"
        if self.searches:
            return round_by_search(weight, codec, lead, moments, gain), "search", ""
        rows: EncodedRows = self.rounding(weight, codec, lead, moments)
        note = _few(moments) if self.needs_data and moments is not None and lead == 2 else ""
        return rows, self.name, note


def gain_of(weight: Weight) -> float:
    """The gain of a search for a weight. Rows of a table are looked up, not multiplied: their size matters little."""
    return 0.0 if all(slot.target.float_class is nn.Embedding for slot in weight.slots) else GAIN


def _few(moments: InputMoments) -> str:
    """Which experts of a weight had too few inputs."""
    few = [group for group, count in enumerate(moments.counts) if count < FEWEST]
    if not few:
        return ""
    listed = ", ".join(map(str, few[:8])) + (" and more" if len(few) > 8 else "")
    return f"by search for {len(few)} of {moments.groups} experts ({listed}), with fewer than {FEWEST} inputs"


def as_rounding(rounding: object) -> Chosen:
    """The rounding that an argument names."""
    if isinstance(rounding, str) and rounding in NAMED:
        return Chosen(rounding, NAMED[rounding], rounding == "gptq")
    if isinstance(rounding, GPTQ):
        return Chosen("gptq", rounding, True)
    if callable(rounding):
        return Chosen(getattr(rounding, "__name__", type(rounding).__name__), rounding, False)
    raise SpecError(
        f"rounding={rounding!r}: expected {', '.join(map(repr, NAMED))}, or a narrowcast.nn.GPTQ with options. Learned "
        'rounding is calibrate_(model, loader, rounding="learned"), after prepare_qat_.'
    )
