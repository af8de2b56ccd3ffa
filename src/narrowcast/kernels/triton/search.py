"""Triton: rows with the scales that lose least.

Rows are encoded to the nearest first. Then the scales in them are replaced by the best ones, and the codes by those
under the new scales. So nothing is held besides the rows.
"""

from __future__ import annotations

from torch import Tensor

from narrowcast.kernels.layout import Format, Recipe, Scale, layout, scaling
from narrowcast.kernels.reference import search as meaning
from narrowcast.kernels.triton import cuts, search_kernels
from narrowcast.kernels.triton.arguments import (
    form_of,
    loadable,
    on,
    options,
    places,
    scale_size,
    searching,
    seen,
)
from narrowcast.kernels.triton.cuts import cut, launches, tile_for
from narrowcast.kernels.triton.groups import Group, group
from narrowcast.kernels.triton.rows import encode
from narrowcast.kernels.triton.tables import cells

GROUPS = 4
"""Blocks that a program of the search takes, a warp: eight threads for each."""


def encode_searched(out: Tensor, rows: Tensor, importance: Tensor | None, gain: float, recipe: Recipe) -> None:
    """Encode `rows`, whose elements are side by side, into `out` with searched scales."""
    encode(out, rows, recipe, 0)
    if recipe.format.scale != Scale.NONE:
        with on(rows.device):
            _search(out, rows, importance, gain, recipe)
            _requantize(out, rows, recipe)


def _search(out: Tensor, rows: Tensor, importance: Tensor | None, gain: float, recipe: Recipe) -> None:
    """Replace the scales and zero points that `out` holds by those that lose least."""
    format = recipe.format
    count, numel = rows.shape
    where = layout(format, numel)
    size = min(where.block_size, numel)
    width = min(meaning.LANES, max(8, 1 << (size - 1).bit_length()))
    pieces = -(-size // width)
    blocks = count * where.blocks
    x = loadable(rows)
    search_kernels.search_kernel[(-(-blocks // GROUPS),)](
        scales=seen(out, scale_size(format)),
        out=out,
        x=x,
        weights=x if importance is None else importance.contiguous(),
        levels=x if recipe.table is None else cells(recipe.table).levels,
        x_stride=rows.stride(0) if count > 1 else numel,
        row_bytes=where.row_bytes,
        count=blocks,
        pieces=pieces,
        gain=float(gain),  # an integer would be passed as one
        top_scale=scaling(format, recipe.peak).limit,
        **places(format, numel),
        **searching(recipe.table, x),
        FORM=form_of(format, rows.device),
        TRY=_candidates(format),
        GROUPS=GROUPS,
        WIDTH=width,
        WEIGHTED=importance is not None,
        GAIN=gain != 0,
        ONE=pieces == 1,
        num_warps=1,
        enable_fp_fusion=False,
    )


def _candidates(format: Format) -> Group:
    """TRY: the factors of reference/search.py, and how often the best scale is fitted."""
    factors = meaning.candidates(format)
    first, second, third = (*factors, 0.0, 0.0, 0.0)[:3]
    assert len(factors) <= 3, "search_kernel tries three factors"
    return group(count=len(factors), first=first, second=second, third=third, refinements=meaning.REFINEMENTS)


def _requantize(out: Tensor, rows: Tensor, recipe: Recipe) -> None:
    """Write the codes of `rows` under the scales that `out` holds."""
    format = recipe.format
    count, numel = rows.shape
    x = loadable(rows)
    tile = tile_for("encode", format)
    tiles = cut(format, numel, tile.elements, cuts.ONE_PASS)
    code_size = max(format.bits // 8, 1)
    for launch in launches(tiles):
        search_kernels.codes_kernel[(launch["tiles"] * count,)](
            codes=seen(out, code_size),
            scales=seen(out, scale_size(format)),
            out=out,
            x=x,
            x_stride=rows.stride(0) if count > 1 else numel,
            row_bytes=layout(format, numel).row_bytes,
            chunks=tiles.chunks,
            **places(format, numel),
            **launch,
            **searching(recipe.table, x),
            FORM=form_of(format, x.device),
            CODE_SIZE=code_size,
            SINGLE=count == 1,
            **options(tiles, tile),
        )
