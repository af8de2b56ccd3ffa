"""Triton: tables of levels. Codes to levels and numbers to codes, through lookups in a warp's own registers."""

# Triton reads annotations: no `from __future__ import annotations` here. Its language is not one that mypy knows.
# mypy: ignore-errors
import triton
import triton.language as tl

from narrowcast.kernels.triton.codes import NATIVE, WHOLE, WHOLE_BITS, as_bits, as_float


@triton.jit
def lookup(table, index, SIZE: tl.constexpr):
    """table[index] for int32 tables of SIZE, a power of two; other bits of the index do not count.

    Small tables are held by the lanes of a warp, one entry each, and a shuffle reads them: no address to compute. A
    `tl.load` of scattered addresses would also make the compiler move the whole tile to another layout and back.
    """
    if NATIVE and SIZE <= 32:
        held = tl.inline_asm_elementwise(
            "{ .reg .b32 lane; .reg .b64 at; mov.u32 lane, %laneid; and.b32 lane, lane, $2; "
            "mad.wide.u32 at, lane, 4, $1; ld.global.nc.b32 $0, [at]; }",
            "=r,l,r",
            [table.to(tl.int64), SIZE - 1],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        # The last-but-one operand makes segments of SIZE lanes, so that only the index's low bits count.
        segment: tl.constexpr = ((32 - SIZE) << 8) | 31
        entry = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, $3, -1;",
            "=r,r,r,n",
            [held, index, segment],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    elif NATIVE:
        entry = tl.inline_asm_elementwise(
            "{ .reg .b64 at; mad.wide.u32 at, $2, 4, $1; ld.global.nc.b32 $0, [at]; }",
            "=r,l,r",
            [table.to(tl.int64), index & (SIZE - 1)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        entry = tl.load(table + (index & (SIZE - 1)))
    return entry


@triton.jit
def count_near(y, thresholds, bend, slope, middle, reach, COUNT: tl.constexpr, OPEN: tl.constexpr):
    """How many thresholds lie below y, where a curve through y says it within one; see `curves.fit`.

    OPEN: y is at most 2% larger than the largest level, as far as the curve reaches.
    """
    near = y if OPEN else tl.minimum(tl.maximum(y, -reach), reach)
    guess = tl.fma(tl.abs(near), tl.full(near.shape, bend, tl.float32), tl.full(near.shape, slope, tl.float32))
    # The low bits of the sum are the guess. Whatever a NaN became, the lookup stays inside the table, and its block's
    # codes are thrown away later.
    guess = as_bits(tl.fma(guess, near, tl.full(near.shape, middle, tl.float32)) + WHOLE)
    # Less than nothing is left to the next threshold where y is beyond it.
    left = as_float(lookup(thresholds, guess, COUNT)) - y
    return guess - WHOLE_BITS + (left.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)


@triton.jit
def count_below(y, cells, slope, middle, CELLS: tl.constexpr, STEPS: tl.constexpr, SEARCHED: tl.constexpr,
                OPEN: tl.constexpr):  # fmt: skip
    """How many thresholds lie below y: the code of y in a table of levels.

    y's cell, a monotone function of y, says how many lie in the cells before; at most 2**STEPS - 1 lie in its own, and
    a few comparisons count those. tables.py lays the cells out with the same arithmetic. OPEN: y is at most 2%
    larger than the largest level, and the cells reach that far.
    """
    # The low bits of the sum are the cell. Whatever a NaN became, lookups stay inside the table, and its block's codes
    # are thrown away later.
    cell = y * slope + middle
    if not OPEN:
        cell = tl.minimum(tl.maximum(cell, 0.0), (CELLS - 1) * 1.0)
    cell = as_bits(cell + WHOLE)
    code = lookup(cells, cell, CELLS)
    if STEPS == 1:
        code += (y > as_float(lookup(cells + CELLS, cell, CELLS))).to(tl.int32)
    else:
        for step in tl.static_range(STEPS):
            ahead = lookup(cells + CELLS, code + ((1 << (STEPS - 1 - step)) - 1), SEARCHED)
            code += tl.where(y > as_float(ahead), 1 << (STEPS - 1 - step), 0)
    return code
