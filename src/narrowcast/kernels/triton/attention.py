"""Triton: attention of one new position of each sequence over a cache of fixed size.

    queries [batch, heads * size], keys and values [batch, key_heads * size]: of the new position, before rotation
    turns [positions, 2, size / 2]: cosines and sines, fp32;   at [batch]: the new position of each sequence
    cache of keys and of values: [batch, key_heads, positions, size], the last two dimensions contiguous

A program of `attend_kernel` takes one key head of one sequence and a span of positions, with all queries of that head.
It turns its queries and the new key, and attends to the positions of its span up to `at`. The program in whose span the
new position lies writes the new key and value to the cache. Where there are several spans, `combine_kernel` joins their
results: a softmax over spans is exact if each says its largest score and its sum. The number of spans depends on sizes
alone, never on `at`, so that the same launch serves every step of a CUDA graph.

Scores, softmax and sums are fp32, the order of sums depends on sizes alone. Queries are not rounded after their turn;
keys are, since the cache holds them.
"""

# Triton reads annotations: no `from __future__ import annotations` here. Its language is not one that mypy knows.
# mypy: ignore-errors
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from narrowcast.kernels.triton.arguments import on
from narrowcast.kernels.triton.kinds import KINDS, after_the_last, bits_of, early, from_kind, to_kind

PROGRAMS = 512
"""About how many programs keep a large GPU busy: no more spans than give these."""

TILE = 8192
"""Elements of queries times keys that a program has in registers at a time."""

SHORTEST, MOST = 64, 64
"""Positions of a span at least, and spans at most."""


class Spans(NamedTuple):
    """How positions are divided: `count` spans of `length`, taken `step` at a time."""

    count: int
    length: int
    step: int


def divide(positions: int, programs: int, group: int, size: int) -> Spans:
    """Spans for so many positions, where each span means `programs` more programs."""
    step = max(8, TILE // (group * size))
    count = max(1, min(-(-positions // SHORTEST), -(-PROGRAMS // programs), MOST))
    length = triton.cdiv(triton.cdiv(positions, count), step) * step
    return Spans(triton.cdiv(positions, length), length, step)


@triton.jit
def turned(x, near, SIZE: tl.constexpr, d, cos, sin, mask, KIND: tl.constexpr):
    """Elements d of heads at pointers x, turned: each with its partner in the other half."""
    one = from_kind(tl.load(x + d, mask=mask, other=0), KIND)
    other = from_kind(tl.load(x + near, mask=mask, other=0), KIND)
    return one * cos + other * sin


@triton.jit
def over_span(q, new_key, new_value, key_cache, value_cache, begin, end, now, d, inside, KIND: tl.constexpr,
              GROUP: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Queries [GROUP, WIDE] over positions from `begin` to `end`: largest scores, sums, and mixed values."""
    top = tl.full([GROUP], float("-inf"), tl.float32)
    mass = tl.zeros([GROUP], tl.float32)
    mixed = tl.zeros([GROUP, WIDE], tl.float32)
    for first in range(begin, end, STEP):
        place = first + tl.arange(0, STEP)
        cell = place[:, None] * SIZE + d[None, :]
        known = (place < now)[:, None] & inside[None, :]
        here = (place == now)[:, None]
        key = tl.where(here, new_key[None, :], tl.load(key_cache + cell, mask=known, other=0))
        value = tl.where(here, new_value[None, :], tl.load(value_cache + cell, mask=known, other=0))
        score = tl.sum(q[:, None, :] * from_kind(key, KIND)[None, :, :], 2)
        score = tl.where((place <= now)[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        keep = tl.exp2(top - higher)
        share = tl.exp2(score - higher[:, None])
        mass = mass * keep + tl.sum(share, 1)
        mixed = mixed * keep[:, None] + tl.sum(share[:, :, None] * from_kind(value, KIND)[None, :, :], 1)
        top = higher
    return top, mass, mixed


@triton.jit(do_not_specialize=["scale"])
def attend_kernel(queries, keys, values, turns, at, key_cache, value_cache, out, sums, q_stride, k_stride, v_stride,
                  cache_stride, head_stride, span, scale, KIND: tl.constexpr, HEADS: tl.constexpr,
                  GROUP: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, STEP: tl.constexpr,
                  SPLIT: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """HEADS queries to a key, padded to GROUP; `scale` is 1 / sqrt(size) / ln 2. Without SPLIT, `out` is the result."""
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    d = tl.arange(0, WIDE)
    inside = d < SIZE
    low = d < SIZE // 2
    near = tl.where(low, d + SIZE // 2, d - SIZE // 2)
    g = tl.arange(0, GROUP)
    after_the_last(EARLY)
    now = tl.load(at + row).to(tl.int32)
    begin = part * span
    if begin <= now:
        angle = turns + now.to(tl.int64) * SIZE + tl.where(low, d, near)
        cos = tl.load(angle, mask=inside, other=0)
        sin = tl.load(angle + SIZE // 2, mask=inside, other=0)
        sin = tl.where(low, -sin, sin)
        q_at = queries + row * q_stride + (head * HEADS + g)[:, None] * SIZE
        q = turned(q_at, near[None, :], SIZE, d[None, :], cos[None, :], sin[None, :],
                   (g < HEADS)[:, None] & inside[None, :], KIND) * scale  # fmt: skip
        new_key = to_kind(turned(keys + row * k_stride + head * SIZE, near, SIZE, d, cos, sin, inside, KIND), KIND)
        new_value = tl.load(values + row * v_stride + head * SIZE + d, mask=inside, other=0)
        base = row * cache_stride + head.to(tl.int64) * head_stride
        mine = d < tl.where(now < begin + span, SIZE, 0)
        tl.store(key_cache + base + now * SIZE + d, new_key, mask=mine)
        tl.store(value_cache + base + now * SIZE + d, new_value, mask=mine)
        top, mass, mixed = over_span(q, new_key, new_value, key_cache + base, value_cache + base, begin,
                                     tl.minimum(begin + span, now + 1), now, d, inside, KIND, GROUP, SIZE, WIDE,
                                     STEP)  # fmt: skip
        heads = tl.num_programs(1) * HEADS
        to = row * heads + head * HEADS + g
        wanted = (g < HEADS)[:, None] & inside[None, :]
        if SPLIT:
            slot = to * tl.num_programs(0) + part
            tl.store(out + slot[:, None] * SIZE + d[None, :], mixed, mask=wanted)
            tl.store(sums + slot * 2, top, mask=g < HEADS)
            tl.store(sums + slot * 2 + 1, mass, mask=g < HEADS)
        else:
            result = to_kind(mixed / mass[:, None], KIND)
            tl.store(out + to[:, None] * SIZE + d[None, :], result, mask=wanted)


@triton.jit
def combine_kernel(parts, sums, at, out, span, spans, KIND: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
                   SPANS: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Join the spans of one head."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, WIDE)
    inside = d < SIZE
    number = tl.arange(0, SPANS)
    after_the_last(EARLY)
    now = tl.load(at + row).to(tl.int32)
    there = (number < spans) & (number * span <= now)
    to = row * tl.num_programs(0) + head
    slot = to * spans + number
    top = tl.load(sums + slot * 2, mask=there, other=float("-inf"))
    mass = tl.load(sums + slot * 2 + 1, mask=there, other=0)
    part = tl.load(parts + slot[:, None] * SIZE + d[None, :], mask=there[:, None] & inside[None, :], other=0)
    weight = tl.exp2(top - tl.max(top, 0))
    result = tl.sum(part * weight[:, None], 0) / tl.sum(mass * weight, 0)
    tl.store(out + to * SIZE + d, to_kind(result, KIND), mask=inside)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, turns: Tensor, at: Tensor, key_cache: Tensor, value_cache: Tensor
) -> Tensor:
    """Keep the new keys and values, and attend: [batch, heads * size]."""
    batch, key_heads, positions, size = key_cache.shape
    heads, kind = queries.shape[1] // size, KINDS[queries.dtype]
    group, wide = triton.next_power_of_2(heads // key_heads), triton.next_power_of_2(size)
    spans = divide(positions, batch * key_heads, group, wide)
    out = torch.empty(batch, heads * size, dtype=queries.dtype, device=queries.device)
    split = spans.count > 1
    every, device = batch * heads * spans.count, queries.device
    parts = torch.empty(every, size, dtype=torch.float32, device=device) if split else bits_of(out)
    sums = torch.empty(every, 2, dtype=torch.float32, device=device) if split else turns
    sizes = {"KIND": kind, "SIZE": size, "WIDE": wide, **early(queries.device)}
    with on(queries.device):
        attend_kernel[(spans.count, key_heads, batch)](
            bits_of(queries),
            bits_of(keys),
            bits_of(values),
            turns,
            at,
            bits_of(key_cache),
            bits_of(value_cache),
            parts,
            sums,
            queries.stride(0),
            keys.stride(0),
            values.stride(0),
            key_cache.stride(0),
            key_cache.stride(1),
            spans.length,
            1.0 / math.sqrt(size) / math.log(2.0),
            HEADS=heads // key_heads,
            GROUP=group,
            STEP=spans.step,
            SPLIT=split,
            num_warps=min(16, max(4, group * wide * spans.step // 1024)),
            **sizes,
        )
        if split:
            padded = triton.next_power_of_2(spans.count)
            combine_kernel[(heads, batch)](
                parts, sums, at, bits_of(out), spans.length, spans.count, SPANS=padded, num_warps=4, **sizes
            )
    return out
