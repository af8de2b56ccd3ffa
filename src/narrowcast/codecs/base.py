"""The contract of a codec.

A codec turns rows of floats into rows of bytes, and back. It promises:

- **Size.** `row_bytes(numel)` depends on `numel` alone, and is a multiple of 16.
- **Bytes.** The same row (and seed) gives the same bytes on every machine and device.
- **Bound.** `|x - decode(encode(x))| <= max_error(x)` for every element of a block that is finite.
- **Zeros.** A block of zeros decodes to zeros, unless the codec is a table without the level 0.
- **Non-finite.** A block that holds a NaN or an infinity decodes to NaN throughout; other blocks do not notice.
  A plain cast keeps each infinity and NaN where it is, and saturates finite values.
- **Purity.** Inputs are never changed; `out` is written only once everything has been checked.
- **Fields.** `split` takes rows apart into codes, scales and zero points, and `join` is its exact inverse. Nothing
  outside codecs/ slices row bytes.

A codec never learns what a rank, a layer or a file is. To write one, subclass `Codec`, describe its codes as a
`Recipe` (what kernels need to know), give `_bound`, and name it with `narrowcast.register_codec`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from narrowcast.codecs import checks, fields
from narrowcast.codecs.options import write_spec
from narrowcast.kernels import operators
from narrowcast.kernels.lasting import lasting
from narrowcast.kernels.layout import ROW, Format, Recipe, layout
from narrowcast.kernels.operators import linear as multiply
from narrowcast.kernels.reference import casts


class Codec:
    """Rows of floats to rows of bytes, and back. Immutable; equal codecs have equal specs."""

    options: ClassVar[tuple[str, ...]] = ()
    """The options that a spec string may give, in the order in which `spec` writes them."""
    from_config: ClassVar[Callable[[Mapping[str, Any]], Codec]]
    """The inverse of `config`: the registry's `codec`, which the registry puts here. Pickles name it."""

    def __init__(
        self,
        name: str,
        format: Format,
        peak: float,
        given: dict[str, object],
        table: Tensor | None = None,
    ) -> None:
        self.name = name
        self.format = format
        self.peak = peak
        self.given = given
        cpu = torch.device("cpu")
        self._tables = {} if table is None else {cpu: lasting(table.clone, cpu)}
        self._recipes: dict[torch.device, Recipe] = {}
        self.spec = write_spec(name, given)

    @property
    def bits(self) -> int:
        """Bits per code, scales not counted."""
        return self.format.bits

    @property
    def block(self) -> int | str | None:
        """Elements per scale, "row", or None where there is no scale."""
        return "row" if self.format.block == ROW else self.format.block or None

    @property
    def stochastic(self) -> bool:
        return bool(self.format.stochastic)

    def row_bytes(self, numel: int) -> int:
        """The bytes that a row of `numel` floats takes."""
        checks.count(numel, "numel")
        return layout(self.format, numel).row_bytes

    def bits_per_element(self, numel: int = 1 << 20) -> float:
        """Bits per element of a long row, scales and padding counted."""
        return 8 * self.row_bytes(numel) / numel

    def config(self) -> dict[str, object]:
        """Plain values from which `narrowcast.codec` makes this codec again."""
        return {"name": self.name, **self.given}

    # -- operations: the last dimension is the row, the ones before it count rows ---------------------------------

    def encode(self, rows: Tensor, seed: int | None = None, *, out: Tensor | None = None) -> Tensor:
        """Encode `rows` [..., numel] to uint8 [..., row_bytes(numel)].

        `seed` drives stochastic rounding; without one, a fresh seed comes from torch's default generator.
        """
        checks.float_rows(rows, "rows")
        flat = checks.as_matrix(rows, "rows")
        if out is None:
            return _shaped(self.encode_matrix(flat, seed), rows)
        seed = checks.seed(seed) if self.format.stochastic else 0
        recipe = self.recipe(rows.device)
        checks.out(out, (*rows.shape[:-1], self.row_bytes(flat.shape[1])), (torch.uint8,), rows.device)
        return _write(out, lambda target: operators.encode_(target, flat, recipe, seed), flat)

    def encode_matrix(self, rows: Tensor, seed: int | None) -> Tensor:
        """`encode` of a plain float matrix that has been checked."""
        seed = checks.seed(seed) if self.format.stochastic else 0
        return operators.encode(rows, self.recipe(rows.device), seed)

    def encode_searched(self, rows: Tensor, importance: Tensor | None = None, gain: float = 0.0) -> Tensor:
        """`encode` with the stored scales that lose least; reference/search.py has `importance` and `gain`."""
        checks.float_rows(rows, "rows")
        checks.gain(gain)
        flat = checks.as_matrix(rows, "rows")
        return _shaped(operators.encode_searched(flat, importance, gain, self.recipe(rows.device)), rows)

    def decode(
        self, rows: Tensor, numel: int, dtype: torch.dtype = torch.float32, *, out: Tensor | None = None
    ) -> Tensor:
        """Decode `rows` [..., row_bytes(numel)] to [..., numel]."""
        checks.byte_rows(rows, self, numel, "rows")
        flat = checks.as_matrix(rows, "rows")
        recipe = self.recipe(rows.device)
        if out is None:
            checks.float_dtype(dtype, "dtype")
            return _shaped(operators.decode(flat, numel, dtype, recipe), rows)
        checks.out(out, (*rows.shape[:-1], numel), checks.FLOATS, rows.device)
        return _write(out, lambda target: operators.decode_(target, flat, recipe), flat)

    def decode_sum(
        self,
        rows: Tensor,
        numel: int,
        dtype: torch.dtype = torch.float32,
        *,
        own: Tensor | None = None,
        own_rank: int = 0,
        divisor: int = 1,
        out: Tensor | None = None,
    ) -> Tensor:
        """Sum encoded `rows` [ranks, row_bytes(numel)] in order, in fp32: a result of shape [numel].

        `own` [numel], where given, stands exact in the place of row `own_rank`. The sum is divided by `divisor`.
        """
        rows, own = checks.summands(rows, self, numel, own, own_rank, divisor)
        recipe = self.recipe(rows.device)
        if out is None:
            checks.float_dtype(dtype, "dtype")
            return operators.decode_sum(rows, numel, dtype, recipe, own, own_rank, divisor)
        checks.out(out, (numel,), checks.FLOATS, rows.device)
        return _write(
            out, lambda target: operators.decode_sum_(target[0], rows, recipe, own, own_rank, divisor), rows, own
        )

    def decode_sum_encode(
        self,
        rows: Tensor,
        numel: int,
        seed: int | None = None,
        *,
        own: Tensor | None = None,
        own_rank: int = 0,
        divisor: int = 1,
        out: Tensor | None = None,
    ) -> Tensor:
        """`decode_sum` and `encode` in one pass: uint8 [row_bytes(numel)]. The heart of a reduction."""
        rows, own = checks.summands(rows, self, numel, own, own_rank, divisor)
        seed = checks.seed(seed) if self.stochastic else 0
        recipe = self.recipe(rows.device)
        if out is None:
            return operators.decode_sum_encode(rows, numel, recipe, own, own_rank, divisor, seed)
        checks.out(out, (rows.shape[-1],), (torch.uint8,), rows.device)
        arguments = rows, numel, recipe, own, own_rank, divisor, seed
        return _write(out, lambda target: operators.decode_sum_encode_(target[0], *arguments), rows, own)

    def linear(self, x: Tensor, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """x W^T + bias, where `rows` [out, row_bytes(numel)] is W encoded and x is [..., numel].

        The result is [..., out] in x's dtype, summed in fp32; differentiable in x and bias. `rows` is trusted.
        """
        return multiply.linear(x, rows, self.recipe(x.device), bias)

    # -- the bound ----------------------------------------------------------------------------------------------

    def max_error(self, x: Tensor) -> Tensor:
        """A bound on `|x - decode(encode(x))|`, elementwise: fp32 or fp64; infinity in blocks that are not finite."""
        # docs/bounds.md derives it.
        checks.float_rows(x, "x")
        rows = self.as_rows(x.detach())
        numel = rows.shape[1]
        if rows.numel() == 0:
            return torch.zeros(x.shape, dtype=checks.at_least_float32(x.dtype), device=x.device)
        value = casts.to_float32(rows).double()
        scale, zeros = self._scales(self.encode(rows, 0), numel)
        bound = self._bound(value, scale, zeros)
        # The divisions, products and sums on the way each round once, to 2**-24 of the value or 2**-150.
        bound = bound + value.abs() * 2.0**-20 + 2.0**-148
        # fp64 rounds to fp32 on the way in, fp16 and bf16 round once more on the way out.
        bound = bound + (rows.double() - value).abs()
        if x.dtype in (torch.float16, torch.bfloat16):
            info = torch.finfo(x.dtype)
            bound = bound + (value.abs() + bound) * info.eps / 2 + info.smallest_normal * info.eps
        bound = torch.where(scale.isfinite() & value.isfinite(), bound * (1 + 2.0**-20), math.inf)
        return bound.to(checks.at_least_float32(x.dtype)).view(x.shape)

    def _bound(self, value: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
        """The error in exact arithmetic of `value` (fp64) in blocks with these scales and zero points."""
        raise NotImplementedError

    def _scales(self, data: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """The scale and the zero point of every element, in fp64, as stored in `data`."""
        stored, zero_points = fields.split_scales(self, data, numel)
        if stored is None:
            ones = torch.ones(len(data), numel, dtype=torch.float64, device=data.device)
            return ones, torch.zeros_like(ones)
        zero_points = torch.zeros_like(stored) if zero_points is None else zero_points
        size = layout(self.format, numel).block_size
        scale, zeros = (t.double().repeat_interleave(size, 1)[:, :numel] for t in (stored, zero_points))
        return scale, zeros

    # -- the fields of a row ------------------------------------------------------------------------------------

    def split(self, rows: Tensor, numel: int) -> fields.Fields:
        """Take `rows` [..., row_bytes(numel)] apart: codes [..., numel], scales and zero points [..., blocks].

        Codes are int8 for `intN`, the bits of the float (int16, int32) for 16- and 32-bit casts, and uint8 otherwise:
        a number of the table, an fp8 float's bits, 1 for a minus sign. Scales are fp32. A field that the codec does not
        have is None. The rows are not changed; 8-bit codes and fp32 scales share their memory where alignment allows.
        """
        return fields.split(self, rows, numel)

    def join(self, codes: Tensor, scales: Tensor | None = None, zero_points: Tensor | None = None) -> Tensor:
        """Rows that hold these fields, byte for byte what `split` took apart; values that they cannot are refused."""
        return fields.join(self, codes, scales, zero_points)

    # -- for the library itself -----------------------------------------------------------------------------------

    def as_rows(self, x: Tensor) -> Tensor:
        """A tensor as the rows it is encoded in: one row, or each vector of its last dimension for block=row."""
        if self.format.block != ROW or x.dim() == 0:
            return x.reshape(1, x.numel())
        return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])

    def recipe(self, device: torch.device) -> Recipe:
        """The format and the numbers behind its codes, as operators take them."""
        recipe = self._recipes.get(device)
        if recipe is None:
            recipe = Recipe(self.format, self.peak, self._table(device) if self._tables else None)
            if not torch.compiler.is_compiling():
                self._recipes[device] = recipe
        return recipe

    def _table(self, device: torch.device) -> Tensor:
        if device not in self._tables:
            self._tables[device] = lasting(lambda: self._tables[torch.device("cpu")].to(device), device)
        return self._tables[device]

    def __repr__(self) -> str:
        return f"codec({self.spec!r})"

    def __str__(self) -> str:
        return self.spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Codec) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash(self.spec)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).from_config, (self.config(),)

    def __copy__(self) -> Codec:
        return self

    def __deepcopy__(self, memo: object) -> Codec:
        return self


def _shaped(matrix: Tensor, rows: Tensor) -> Tensor:
    """A result [rows, m] with the leading dimensions of the `rows` [..., n] that it came from."""
    dims = rows.dim()
    if dims == 2:
        return matrix
    return matrix.view(-1) if dims == 1 else matrix.view(*rows.shape[:-1], matrix.shape[1])


def _write(out: Tensor, write: Callable[[Tensor], None], *sources: Tensor | None) -> Tensor:
    """Let `write` fill a matrix of rows: `out` itself, or a copy that is then copied.

    A copy where `out` is not contiguous, and where it may share memory with what is read: a kernel would read there
    what it has just written.
    """
    plain = out.is_contiguous() and (torch.compiler.is_compiling() or checks.unshared(out, sources))
    target = out if plain else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    dims = target.dim()
    write(target if dims == 2 else target.unsqueeze(0) if dims == 1 else target.flatten(0, -2))
    if not plain:
        out.copy_(target)
    return out
