"""The seeds of stochastic rounding, written down a second time: what the oracles of these tests draw with.

splitmix64 as Steele, Lea and Flood publish it, over the words that tell one encoding from all others; and the number of
a section, which is a digest of its first column and its parameter's name.
"""

from __future__ import annotations

import hashlib

GOLDEN = 0x9E3779B97F4A7C15


def mix(word: int) -> int:
    z = (word + GOLDEN) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def derived(seed: int, *words: int) -> int:
    state = mix(seed)
    for word in words:
        state = mix(state ^ mix(word + GOLDEN))
    return mix(state ^ len(words)) // 2


def section_key(name: str, start: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{start} {name}".encode(), digest_size=7).digest(), "little")
