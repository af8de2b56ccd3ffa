"""How the weights of a layer are rounded to the levels of a codec.

A rounding takes the floats of a weight, a codec and statistics of the layer's inputs, and gives encoded rows:

    rows = rounding(weight, codec, lead, moments)

- `weight` [*lead dimensions, *row], `lead` of whose dimensions count rows, is never changed.
- `moments` is the `InputMoments` of the batches that the layer has seen, or None. A rounding that needs them says so.
- The result is an `EncodedRows` with the weight's own shape and dtype. Whatever the rounding, its rows are ordinary
  rows of the codec: nothing that reads them knows how they were rounded.

    nearest           needs no statistics
    search            counts columns by the squares of their inputs, where these are known
    gptq              needs the moments of the layer's inputs
    learned           rounds layers in training to the levels of their learned grid

    choice            the rounding that a caller names, and the one that a weight gets
    moments, losses   what is known of inputs; what a rounding loses on a layer's output
    random_tokens     what inputs look like without data
    batches, recording, sequence   data, inputs of weights while the model runs, the order in which weights are rounded
    passes, resume    a batch through a model; rows that an interrupted call has rounded already
    sums, residuals   embeddings whose rows are added; layers whose output is added to something
    output_losses     what errors of a weight cost the model's output
    undo, progress    a model as it was; a bar on a terminal
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.codecs.payload import EncodedRows
from narrowcast.nn.rounding.moments import InputMoments


class Rounding(Protocol):
    """Floats, a codec and statistics to rows."""

    def __call__(self, weight: Tensor, codec: Codec, lead: int, moments: InputMoments | None = None) -> EncodedRows: ...
