"""The choice of the next token from its logits."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from narrowcast.errors import SpecError

COLDEST = 1e-6
SEEDS = range(-(2**63), 2**64)
"""What torch.Generator.manual_seed takes."""
NONE = -1
"""In place of a token, where logits say of none that it is likelier than others."""


@dataclass(frozen=True)
class Sampling:
    """`temperature=0` takes the most likely token.

    Otherwise tokens are drawn: from the `top_k` likeliest, and from the fewest that together have `top_p` of the
    probability.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.temperature, Real) or not (
            self.temperature == 0 or COLDEST <= self.temperature < float("inf")
        ):
            raise SpecError(
                f"temperature={self.temperature}: must be 0 (the likeliest token), or at least {COLDEST:g} (logits are "
                "divided by it in fp32), such as 0.8."
            )
        if self.top_k is not None and not (isinstance(self.top_k, Integral) and self.top_k >= 1):
            raise SpecError(f"top_k={self.top_k}: must be a whole number, at least 1, or None for every token.")
        if self.top_p is not None and not (isinstance(self.top_p, Real) and 0 < self.top_p <= 1):
            raise SpecError(f"top_p={self.top_p}: must be above 0 and at most 1, such as 0.9.")
        if not isinstance(self.seed, Integral) or int(self.seed) not in SEEDS:
            raise SpecError(f"seed={self.seed}: must be a whole number, from -2**63 to 2**64 - 1.")

    def generator(self, device: torch.device) -> torch.Generator:
        """What draws the tokens of one generation."""
        return torch.Generator(device).manual_seed(int(self.seed))

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """The next token of each sequence: [batch, words] to [batch]. NONE where logits hold a NaN.

        Where a token is drawn, also where they hold an infinity, which has no share, or nothing but -infinity.
        """
        if self.temperature == 0:
            highest, tokens = logits.max(-1)
            return tokens.masked_fill(highest.isnan(), NONE)
        scores = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            least = scores.topk(int(self.top_k), -1).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            scores = self._within_mass(scores, self.top_p)
        # What torch.multinomial does for one draw, without its checks, which wait for the device.
        waits = torch.empty_like(scores).exponential_(generator=generator)
        shares = scores.softmax(-1)  # all of them NaN, where one score is; or infinite
        return (shares / waits).argmax(-1).masked_fill(shares[:, 0].isnan(), NONE)

    def _within_mass(self, scores: Tensor, mass: float) -> Tensor:
        """Only the likeliest tokens that together have `mass`. One always stays.

        Sorted and summed as by transformers' TopPLogitsWarper: of equally likely tokens, the same ones stay.
        """
        ordered, places = scores.sort(-1)
        beyond = ordered.softmax(-1).cumsum(-1) <= 1 - mass
        beyond[:, -1] = False
        return scores.masked_fill(torch.zeros_like(beyond).scatter(-1, places, beyond), -torch.inf)
