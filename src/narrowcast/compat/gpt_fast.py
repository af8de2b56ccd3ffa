"""Weight-only int8 with one scale per output, as `benchmarks/gpt_fast/quantize.py` of PyTorch has it.

The same names, numbers and state dict keys: `weight` int8 [out, in] and `scales` [out] in the model's dtype, so that
checkpoints written there load here. What differs:

- A layer holds its codes and scales once, as encoded rows of the codec "int8:block=row", and multiplies them as
  `narrowcast.nn.Linear` does: in fp32 sums, with the bias, in the dtype of the input.
- Modules become int8 in place, by a change of their class: a root Linear, hooks and references to a layer keep working.
  A tied weight is quantized once and stays tied: an Embedding that shares it holds the same rows, and looks up
  quantized vectors. nn.MultiheadAttention gets an int8 `out_proj`. `narrowcast.dequantize_` restores floats.
- Converting quantizes the weights that are there. On the meta device nothing is allocated: load with assign=True.
- A row that holds an infinity or a NaN gets the scale NaN, so that all of it decodes to NaN; a state dict of such
  weights is refused. Layers whose names match a regular expression in `skip` stay as they are.

`weight` and `scales` take assignments, those of a rank's part of a layer, too: gpt-fast's tp.apply_tp runs on them.
A length that no part has, and codes beyond -128 to 127, are refused.

Scales are at least 1.2e-7, as they are there: rows that small lose digits. "int8:block=row" itself has no such floor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from narrowcast.compat.int8_rows import CODEC, Int8Rows, Int8Weight, dynamically_quantize_per_channel
from narrowcast.errors import QuantizeError, SpecError
from narrowcast.nn import Linear
from narrowcast.nn.modules.embedding import look_up_rows
from narrowcast.nn.modules.fast_path import set_fast_path
from narrowcast.nn.modules.linear import linear_on_rows
from narrowcast.nn.survey import Slot, Survey, Weight, survey

__all__ = [
    "WeightOnlyInt8Embedding",
    "WeightOnlyInt8Linear",
    "WeightOnlyInt8QuantHandler",
    "dynamically_quantize_per_channel",
    "replace_linear_weight_only_int8_per_channel",
]


class WeightOnlyInt8Linear(Int8Weight):
    """torch.nn.Linear with int8 weights. Before any are loaded, they are zero."""

    float_class = nn.Linear
    __constants__ = ("in_features", "out_features")
    in_features: int
    out_features: int
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self._take(Int8Rows(out_features, in_features, device, dtype))
        zeros = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", zeros)
        self.bias_optional = True

    def forward(self, input: Tensor) -> Tensor:
        return linear_on_rows(input, self.ready_rows(), CODEC, self.rows.numel, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class WeightOnlyInt8Embedding(Int8Weight):
    """torch.nn.Embedding that shares the int8 weights of the Linear it is tied to."""

    float_class = nn.Embedding
    num_embeddings: int
    embedding_dim: int

    def forward(self, input: Tensor) -> Tensor:
        return look_up_rows(input, self.ready_rows().detach(), CODEC, self.rows.numel, self.rows.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


# -- from a float model ----------------------------------------------------------------------------------------------


def replace_linear_weight_only_int8_per_channel(module: nn.Module, skip: Sequence[str] = ()) -> None:
    """Make every Linear of a model int8, in place; those whose names match a pattern of `skip` stay."""
    for weight in _chosen(module, skip):
        floats = weight.slots[0].float_weight().detach()
        rows = _quantized(floats)
        for slot in weight.slots:
            _become(slot, rows)
    set_fast_path(module)


class WeightOnlyInt8QuantHandler:
    """Quantizes a model, into a state dict or in place."""

    def __init__(self, mod: nn.Module, skip: Sequence[str] = ()) -> None:
        self.mod = mod
        self.skip = skip

    @torch.no_grad()
    def create_quantized_state_dict(self) -> dict[str, Tensor]:
        """The state dict with `weight` int8 and `scales` for every Linear, both on the CPU. The model stays as it is.

        An Embedding that is tied to a Linear keeps its floats there, as the original writes it.
        """
        state: dict[str, Tensor] = self.mod.state_dict()
        wrong = []
        for weight in _chosen(self.mod, self.skip):
            slots = [slot for slot in weight.slots if _is_linear(slot)]
            floats = slots[0].float_weight().detach()
            if floats.is_meta:
                raise QuantizeError(f"mod: {slots[0].key} is on the meta device, which holds no values. Load it first.")
            rows = _quantized(floats)
            codes, scales = rows.codes().contiguous().cpu(), rows.scales().clone().cpu()
            if not bool(scales.isfinite().all()):
                wrong.append(slots[0].key)
            for name in (name for slot in slots for name in slot.names):
                prefix = f"{name}." if name else ""
                state[prefix + "weight"], state[prefix + "scales"] = codes, scales
        if wrong:
            raise QuantizeError(
                f"mod: {', '.join(wrong)}: weights hold an infinity or a NaN, for which there are no codes. Usually "
                'a training run diverged. Mend the checkpoint, or leave them as they are: skip=["their names"].'
            )
        return state

    def convert_for_runtime(self) -> nn.Module:
        """The model with int8 Linears, in place."""
        replace_linear_weight_only_int8_per_channel(self.mod, self.skip)
        return self.mod


def _chosen(model: nn.Module, skip: Sequence[str]) -> list[Weight]:
    """The weights of every nn.Linear, without those to skip; refused where a layer would compute something else."""
    surveyed = survey(model)
    linears = [weight for weight in surveyed.weights if any(_is_linear(slot) for slot in weight.slots)]
    names = [[name for slot in weight.slots for name in slot.names] for weight in linears]
    refused = dict(_refusals(model, surveyed))
    known = [*refused, *(name for tied in names for name in tied)]
    for pattern in skip:
        if not any(re.search(pattern, name) for name in known):
            raise SpecError(f"skip: {pattern!r} matches no Linear. Some that there are: {', '.join(known[:5])}.")
    left = {name for name in known if any(re.search(pattern, name) for pattern in skip)}
    for name in refused:
        if name not in left:
            raise QuantizeError(
                f"module: {name or 'the Linear'} cannot be made int8: {refused[name]}. Leave it as it is with "
                f"skip=[{re.escape(name)!r}]. The model was left as it was."
            )
    return [weight for weight, tied in zip(linears, names, strict=True) if not left.intersection(tied)]


def _refusals(model: nn.Module, surveyed: Survey) -> Iterator[tuple[str, str]]:
    """The names of Linears that cannot be made int8, and why."""
    for skip in surveyed.skips:
        name = skip.name.rpartition(".")[0]
        if isinstance(model.get_submodule(name), nn.Linear):
            yield name, skip.reason
    for weight in surveyed.weights:
        others = [slot.key for slot in weight.slots if not isinstance(slot.module, (nn.Linear, nn.Embedding))]
        for slot in weight.slots:
            if others and _is_linear(slot):
                yield slot.names[0], f"tied to {others[0]}"


def _is_linear(slot: Slot) -> bool:
    return slot.target is Linear and isinstance(slot.module, nn.Linear)


def _quantized(weight: Tensor) -> Int8Rows:
    rows = Int8Rows(weight.shape[0], weight.shape[1], weight.device, weight.dtype)
    if not weight.is_meta:
        rows.quantize(weight)
    return rows


def _become(slot: Slot, rows: Int8Rows) -> None:
    module = slot.module
    del module._parameters["weight"]
    module.__class__ = WeightOnlyInt8Linear if isinstance(module, nn.Linear) else WeightOnlyInt8Embedding
    assert isinstance(module, Int8Weight)
    module._take(rows)
