"""Triton: codes out of the words and bytes that hold them.

Codes narrower than a byte come apart in registers: neighbours lie in the same thread. Aligned tiles are read as
32-bit words, others as bytes.
"""

# Triton reads annotations: no `from __future__ import annotations` here. Its language is not one that mypy knows.
# mypy: ignore-errors
import triton
import triton.language as tl

from narrowcast.kernels.triton.codes import NATIVE, as_float


@triton.jit
def places(TILE: tl.constexpr, SIZE: tl.constexpr):
    """Where units of SIZE elements lie that come in blocks, padded to the tile's width; and which are no padding."""
    width: tl.constexpr = TILE.width // SIZE
    block: tl.constexpr = TILE.block // SIZE
    index = tl.arange(0, TILE.groups * TILE.width // SIZE)
    if width == block:
        place = index
        real = index >= 0
    else:
        place = index // width * block + index % width
        real = index % width < block
    return place, real


@triton.jit
def load_units(ptr, limit, SIZE: tl.constexpr, STRIDE: tl.constexpr, TILE: tl.constexpr):
    """The tile's codes in units of SIZE codes each, STRIDE pointer steps apart."""
    edge: tl.constexpr = TILE.edge
    place, real = places(TILE, SIZE)
    if TILE.masked:
        count = (limit + (SIZE - 1)) // SIZE
        if edge % SIZE == 0:
            count = tl.multiple_of(count, edge // SIZE)
        units = tl.load(ptr + place * STRIDE, mask=real & (place < count), other=0)
    else:
        units = tl.load(ptr + place * STRIDE)
    return units


@triton.jit
def load_codes(ptr, limit, BITS: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr, CLEAN: tl.constexpr):
    """The tile's codes as integers [groups, width]; those of 16 and 32 bits as they lie in memory.

    Where CLEAN is false, the bits above a code are left as they come.
    """
    if BITS == 16 or BITS == 32:
        codes = load_units(ptr, limit, 1, 1, TILE)
    elif BITS & (BITS - 1) == 0:
        held: tl.constexpr = 32 if WORDS else 8
        codes = load_units(ptr, limit, held // BITS, 1, TILE).to(tl.int32)
        for level in tl.static_range(5):
            if (16 >> level) >= BITS and (16 >> level) < held:
                codes = tl.join(codes, codes >> (16 >> level))
        if CLEAN:
            codes = codes & ((1 << BITS) - 1)
    else:
        # Eight codes in BITS bytes.
        kind = tl.int32 if BITS == 3 else tl.int64
        codes = load_units(ptr, limit, 8, BITS, TILE).to(kind)
        for byte in tl.static_range(1, BITS):
            next_byte = load_units(ptr + byte, limit, 8, BITS, TILE).to(kind)
            codes = codes | (next_byte << (8 * byte))
        codes = tl.join(codes, codes >> (4 * BITS))
        codes = tl.join(codes, codes >> (2 * BITS))
        codes = (tl.join(codes, codes >> BITS) & ((1 << BITS) - 1)).to(tl.int32)
    return codes.reshape([TILE.groups, TILE.width])


# -- small whole numbers, straight to fp32 ----------------------------------------------------------------------------


@triton.jit
def insert(word, MASK: tl.constexpr, BASE: tl.constexpr):
    """(word & MASK) ^ BASE, which the compiler makes two instructions of."""
    if NATIVE:
        mask = tl.full([1], MASK, tl.int32)
        base = tl.full([1], BASE, tl.int32)
        word = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0x6A;", "=r,r,r,r", [word, mask, base], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        word = (word & MASK) ^ BASE
    return word


@triton.jit
def field(word, offset, AT: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr):
    """The BITS bits of `word` from bit AT on as an fp32 number, two's complement if HALF is set, less `offset`.

    Under the exponent of 2**(23 - AT) the field's lowest bit weighs 1; taking that power away leaves the number.
    """
    shifted = insert(word, ((1 << BITS) - 1) << AT, ((150 - AT) << 23) ^ (HALF << AT))
    return as_float(shifted) - ((1 << (23 - AT)) + HALF + offset).to(tl.float32)


@triton.jit
def join_eight(a, b, c, d, e, f, g, h):
    """Eight neighbours from eight tensors, along three new dimensions."""
    even = tl.join(tl.join(a, e), tl.join(c, g))
    return tl.join(even, tl.join(tl.join(b, f), tl.join(d, h)))


@triton.jit
def load_whole(ptr, zeros, limit, BITS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr):
    """INT codes (HALF set) or AFFINE codes less their zero point, as fp32 whole numbers [groups, width]."""
    if WORDS and BITS > 1:
        words = load_units(ptr, limit, 32 // BITS, 1, TILE).reshape([TILE.groups, TILE.width * BITS // 32])
        offset = zeros[:, None].to(tl.int32)
        if BITS == 8:
            even = tl.join(field(words, offset, 0, 8, HALF), field(words >> 16, offset, 0, 8, HALF))
            odd = tl.join(field(words, offset, 8, 8, HALF), field(words >> 16, offset, 8, 8, HALF))
            whole = tl.join(even, odd)
        elif BITS == 4:
            # Five fields lie where a mantissa does; the others are brought there.
            rest = words >> 20
            whole = join_eight(
                field(words, offset, 0, 4, HALF), field(words, offset, 4, 4, HALF),
                field(words, offset, 8, 4, HALF), field(words, offset, 12, 4, HALF),
                field(words, offset, 16, 4, HALF), field(rest, offset, 0, 4, HALF),
                field(rest, offset, 4, 4, HALF), field(rest, offset, 8, 4, HALF))  # fmt: skip
        else:
            words = tl.join(words, words >> 16)
            offset = zeros[:, None, None].to(tl.int32)
            whole = join_eight(
                field(words, offset, 0, 2, HALF), field(words, offset, 2, 2, HALF),
                field(words, offset, 4, 2, HALF), field(words, offset, 6, 2, HALF),
                field(words, offset, 8, 2, HALF), field(words, offset, 10, 2, HALF),
                field(words, offset, 12, 2, HALF), field(words, offset, 14, 2, HALF))  # fmt: skip
        whole = whole.reshape([TILE.groups, TILE.width])
    else:
        codes = load_codes(ptr, limit, BITS, TILE, WORDS, True)
        whole = as_float(codes ^ (0x4B000000 | HALF)) - (8388608 + HALF + zeros[:, None]).to(tl.float32)
    return whole


# -- the same, a byte at a time ---------------------------------------------------------------------------------------


@triton.jit
def signed_bytes(word):
    """The four bytes of a word, two's complement, as four fp32 numbers: conversions have a unit of their own."""
    if NATIVE:
        a, b, c, d = tl.inline_asm_elementwise(
            "{ .reg .b32 t<4>; bfe.s32 t0, $4, 0, 8; bfe.s32 t1, $4, 8, 8; bfe.s32 t2, $4, 16, 8; "
            "bfe.s32 t3, $4, 24, 8; cvt.rn.f32.s32 $0, t0; cvt.rn.f32.s32 $1, t1; cvt.rn.f32.s32 $2, t2; "
            "cvt.rn.f32.s32 $3, t3; }",
            "=f,=f,=f,=f,r",
            [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        a, b = ((word << 24) >> 24).to(tl.float32), ((word << 16) >> 24).to(tl.float32)
        c, d = ((word << 8) >> 24).to(tl.float32), (word >> 24).to(tl.float32)
    return a, b, c, d


@triton.jit
def load_bytewise(ptr, limit, TILE: tl.constexpr):
    """16 times the integers of 4-bit INT codes, as fp32 numbers [groups, width], a byte at a time.

    Slower than other ways on its own, since conversions run at an eighth of the rate; but it takes fewer instructions,
    of a kind that nothing else here uses. So a sum over ranks does some of its ranks this way: see `cuts.BYTEWISE`.
    """
    words = load_units(ptr, limit, 8, 1, TILE).reshape([TILE.groups, TILE.width // 8])
    a, c, e, g = signed_bytes((words << 4) & -0x0F0F0F10)
    b, d, f, h = signed_bytes(words & -0x0F0F0F10)
    return join_eight(a, b, c, d, e, f, g, h).reshape([TILE.groups, TILE.width])
