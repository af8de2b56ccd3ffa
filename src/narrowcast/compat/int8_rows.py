"""Int8 weights with one scale per row, held once, under the names `weight` and `scales`.

An `Int8Rows` holds codes and scales as encoded rows of "int8:block=row", which kernels multiply. It is a module, so
that layers with a tied weight can share one: `.to(...)` and loading then change it for all of them. An `Int8Weight` is
a layer that holds one. Its state dict has `weight`, int8 [out, in], and `scales`, [out] in the model's dtype. It loads
these, or a float `weight`, which it quantizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.codecs import checks
from narrowcast.codecs import codec as as_codec
from narrowcast.errors import PayloadError, ShapeError
from narrowcast.nn.modules.base import Encoded, begin, keep_dtype, set_float_dtype
from narrowcast.nn.state import ASSIGN

CODEC = as_codec("int8:block=row")
TILE = 1 << 22
"""Weights that are quantized at a time, so that intermediate results stay small beside the model."""


def dynamically_quantize_per_channel(
    x: Tensor, quant_min: int, quant_max: int, target_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, in], scales [out] in x's dtype, and zero points, which are zero.

    A scale is the row's largest magnitude over (quant_max - quant_min) / 2, at least 1.2e-7. A row that is not finite
    has the scale NaN and codes of zero.
    """
    if x.dim() != 2:
        raise ShapeError(f"x: expected [out, in], a row for each scale, got {list(x.shape)}. Pass x.flatten(1).")
    checks.float_rows(x, "x")
    low, high = torch.aminmax(x, dim=1)
    reach = torch.maximum(-low, high).clamp(min=0)
    scales = (reach / ((quant_max - quant_min) / 2)).clamp(min=torch.finfo(torch.float32).eps).to(x.dtype)
    wrong = ~reach.isfinite()
    codes = (x / scales.unsqueeze(-1)).round_().clamp_(quant_min, quant_max)
    codes.masked_fill_(wrong.unsqueeze(-1), 0)
    scales.masked_fill_(wrong, torch.nan)
    return codes.to(target_dtype), scales, torch.zeros_like(scales, dtype=torch.int64)


def as_codes(codes: object, shape: torch.Size) -> Tensor:
    """int8 codes [out, in] that are assigned to a layer of this shape, or why they are none."""
    if not isinstance(codes, Tensor) or codes.dim() != 2 or codes.is_floating_point() or codes.is_complex():
        raise ShapeError(
            f"weight: expected codes of -128 to 127, [out, in], got {_described(codes)}. "
            "dynamically_quantize_per_channel makes codes and scales of floats; load_state_dict takes floats, too."
        )
    if any(whole % part if part else whole for whole, part in zip(shape, codes.shape, strict=True)):
        raise ShapeError(
            f"weight: expected {list(shape)}, or for a part of the layer a divisor of each, got {list(codes.shape)}."
        )
    codes = codes.detach()
    if codes.dtype != torch.int8 and not codes.is_meta and codes.numel():
        low, high = (int(value) for value in torch.aminmax(codes))
        if low < -128 or high > 127:
            raise PayloadError(
                f"weight: it holds numbers from {low} to {high}, and codes are -128 to 127. Others would wrap around: "
                "divide by the scales first, as dynamically_quantize_per_channel does."
            )
    return codes.to(torch.int8)


def _described(value: object) -> str:
    return checks.describe(value) if isinstance(value, Tensor) else f"a {type(value).__name__}"


# -- what layers hold ------------------------------------------------------------------------------------------------


class Int8Rows(nn.Module):
    """Codes and scales as encoded rows. State dicts hold them under the names of the layers, not under its own."""

    data: nn.Parameter

    def __init__(self, rows: int, numel: int, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.numel = numel
        self.dtype = dtype or torch.get_default_dtype()
        checks.float_dtype(self.dtype, "dtype")
        self._floats: tuple[object, nn.Parameter] | None = None
        self.allocate(rows, device)
        self.write(self.codes(), torch.ones(rows, dtype=torch.float32, device=device))

    def allocate(self, rows: int, device: torch.device | str | None) -> None:
        data = torch.zeros(rows, CODEC.row_bytes(self.numel), dtype=torch.uint8, device=device)
        self.data = nn.Parameter(data, requires_grad=False)

    def codes(self) -> Tensor:
        """int8 [rows, numel]: a view."""
        return CODEC.split(self.data.detach(), self.numel).codes

    def scales(self) -> Tensor:
        """[rows] in the dtype of the model: a view in fp32, else a copy."""
        scales = CODEC.split(self.data.detach(), self.numel).scales
        assert scales is not None
        return scales.squeeze(1).to(self.dtype)

    def write(self, codes: Tensor, scales: Tensor, first: int = 0) -> None:
        """Store codes, and scales rounded to the dtype of the model, from row `first` on."""
        rows = CODEC.join(codes, scales.to(codes.device, self.dtype).float().unsqueeze(1))
        self.data.detach()[first : first + len(rows)].copy_(rows)

    @torch.no_grad()
    def quantize(self, weight: Tensor) -> None:
        step = max(1, TILE // max(self.numel, 1))
        for first in range(0, len(weight), step):
            codes, scales, _ = dynamically_quantize_per_channel(
                weight[first : first + step].float(), -128, 127, torch.int8
            )
            self.write(codes, scales, first)

    def as_floats(self) -> nn.Parameter:
        """The decoded weight: one Parameter for all the layers that share these rows."""
        version = 0 if self.data.is_inference() else self.data._version
        now = self.data.data_ptr(), version, self.dtype
        if self._floats is None or self._floats[0] != now:
            self._floats = now, nn.Parameter(CODEC.decode(self.data.detach(), self.numel, self.dtype))
        return self._floats[1]

    def load(self, weight: Tensor, scales: Tensor | None, assign: bool) -> None:
        """Take codes and scales, or floats to quantize; with `assign`, also their device and dtype."""
        if assign:
            self.dtype = weight.dtype if scales is None else scales.dtype
            self.allocate(len(weight), weight.device)
        if scales is None:
            self.quantize(weight)
        else:
            self.write(weight, scales)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Rows:
        super()._apply(lambda tensor: keep_dtype(fn, tensor), recurse)  # type: ignore[no-untyped-call]
        dtype = fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype
        if dtype in checks.FLOATS and dtype != self.dtype:
            scales = self.scales()
            self.dtype = dtype
            self.write(self.codes(), scales)
        return self

    def _save_to_state_dict(self, *arguments: Any) -> None:
        """Nothing: the layers save and load."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        """Nothing: the layers save and load."""


class Int8Weight(Encoded):
    """A layer whose weight is an `Int8Rows`."""

    rows: Int8Rows
    bias_optional = False
    """Whether a state dict may do without the bias."""
    # The state dict is gpt-fast's own: int8 codes and scales need no further description.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def _take(self, rows: Int8Rows) -> None:
        begin(self, self.float_class, rows.dtype)
        self.rows = rows

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "scales") and "rows" in self._modules:
            # nn.Module would register a Parameter under the name, beside the rows that are multiplied.
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def weight(self) -> Tensor:
        """The codes, int8 [out, in]: a view, strided.

        Codes of another size may be assigned, together with as many scales: a rank's part of a layer, as gpt-fast's
        tp.py cuts it. The layer then holds rows of its own, and its tied ones keep theirs.
        """
        return self.rows.codes()

    @weight.setter
    def weight(self, codes: Tensor) -> None:
        codes = as_codes(codes, self.rows.codes().shape)
        scales = self.scales
        if len(codes) != len(scales):
            raise ShapeError(
                f"weight: it has {len(codes)} rows, and there are {len(scales)} scales, one for each. Assign the "
                f"scales of its rows first: layer.scales = ..., then layer.weight = ..., as gpt-fast's tp.py does."
            )
        if codes.shape != self.rows.codes().shape:
            self.rows = Int8Rows(codes.shape[0], codes.shape[1], codes.device, self.rows.dtype)
        vars(self).pop("_waiting_scales", None)
        self.rows.write(codes, scales)

    @property
    def scales(self) -> Tensor:
        """[out], in the model's dtype."""
        waiting: Tensor | None = vars(self).get("_waiting_scales")
        return self.rows.scales() if waiting is None else waiting

    @scales.setter
    def scales(self, scales: Tensor) -> None:
        rows = len(self.rows.codes())
        count = scales.numel() if isinstance(scales, Tensor) and scales.dim() == 1 else 0
        if not count or rows % count or not scales.is_floating_point():
            raise ShapeError(
                f"scales: expected a float for each of the {rows} rows of weight, got {_described(scales)}. (For a "
                f"part of a layer, first the scales of so many rows, a divisor of {rows}, then their weight.)"
            )
        vars(self).pop("_waiting_scales", None)
        if count == rows:
            self.rows.write(self.rows.codes(), scales.detach())
        else:  # a rank's part: its codes come next
            vars(self)["_waiting_scales"] = scales.detach().to(self.rows.dtype)

    def ready_rows(self) -> Tensor:
        """The rows to multiply with; refused while scales wait for a weight that they fit."""
        waiting: Tensor | None = vars(self).get("_waiting_scales")
        if waiting is not None:
            raise ShapeError(
                f"scales: {len(waiting)} of them were assigned, and weight has {len(self.rows.codes())} rows, one for "
                f"each. Assign the {len(waiting)} rows they belong to, as gpt-fast's tp.py does, or as many scales."
            )
        return self.rows.data

    def decoded(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight as floats, in `dtype` or the model's."""
        return CODEC.decode(self.ready_rows().detach(), self.rows.numel, dtype or self.rows.dtype)

    def _leave(self) -> None:
        self._parameters["weight"] = self.rows.as_floats()
        del self._modules["rows"]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.ready_rows()
        destination[prefix + "weight"], destination[prefix + "scales"] = self.weight, self.scales
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        metadata, strict, missing_keys, unexpected_keys, error_msgs = rest
        keys = prefix + "weight", prefix + "scales"
        weight, scales = state_dict.get(keys[0]), state_dict.get(keys[1])
        others = {key: value for key, value in state_dict.items() if key not in keys}
        missing: list[str] = []
        super()._load_from_state_dict(others, prefix, metadata, strict, missing, unexpected_keys, error_msgs)
        missing_keys += [key for key in missing if not (self.bias_optional and key == prefix + "bias")]
        if isinstance(weight, Tensor) and weight.is_floating_point():
            scales = None
        elif weight is None or scales is None:
            missing_keys += [key for key in keys if strict and key not in state_dict]
            return
        assign = bool(metadata.get(ASSIGN))
        wrong = self._unfit(weight, scales, keys, assign)
        if wrong:
            error_msgs.append(wrong)
            return
        vars(self).pop("_waiting_scales", None)
        self.rows.load(weight, scales, assign)
        set_float_dtype(self, self.rows.dtype)

    def _unfit(self, weight: Tensor, scales: Tensor | None, keys: tuple[str, str], assign: bool) -> str:
        """Why these cannot be loaded; "" if they can."""
        shape = self.weight.shape
        if weight.shape != shape or not (weight.dtype == torch.int8 or weight.is_floating_point()):
            wanted = f"expected int8, or floats to quantize, of shape {list(shape)}"
            return f"{keys[0]}: {wanted}, got {checks.describe(weight)}. The state dict is another model's."
        if scales is not None and (scales.shape != shape[:1] or scales.dtype not in checks.FLOATS):
            return f"{keys[1]}: expected floats of shape {list(shape[:1])}, got {checks.describe(scales)}."
        if self.rows.data.is_meta and not assign and not weight.is_meta:
            return f"{keys[0]}: the module is on the meta device, which holds no values. Load with assign=True."
        return ""
