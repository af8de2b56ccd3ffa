"""Rates of links, in bits a second, as people write them: "1gbit", "10gbps", "2.5Gbit/s".

Prefixes are powers of ten. "gbps" means bits to most people, so it does here (to tc it means bytes). Bare numbers, and
what may mean bytes ("GB/s", "GBps", "gb"), are refused: a figure off by eight looks plausible.
"""

from __future__ import annotations

import re

from .errors import NetlabError

RATE = re.compile(r"(\d+(?:\.\d+)?|\.\d+) ?([kmgt]?)(?:bit/s|bit|bps)", re.IGNORECASE)
BYTES = re.compile(r".*[kmgtKMGT](?:i?B|i?Bps|b)(?:/s)?")
PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
MOST = 10**15


def parse_rate(option: str, text: str, least: int) -> float:
    """Bits a second, at least `least`. Errors begin with the option."""
    bare = text.strip().replace("_", "")
    if BYTES.fullmatch(bare):
        raise NetlabError(
            f"{option} {text!r}: could mean bits or bytes. Rates of links are bits a second: write gbit or gbps, as in "
            "10gbit; 1 GB/s is 8gbit."
        )
    match = RATE.fullmatch(bare)
    rate = float(match[1]) * PREFIXES[match[2].lower()] if match else 0.0
    if not least <= rate <= MOST:
        raise NetlabError(
            f"{option} {text!r}: a rate is a number and kbit, mbit, gbit or tbit (or kbps, mbps, gbps, tbps): bits a "
            f"second, from {short(least)}bit to {short(MOST)}bit. Write, for example, {option} 1gbit or 10gbit."
        )
    return rate


def short(bits: float) -> str:
    """1000000000 -> "1 G"."""
    for prefix, size in reversed(PREFIXES.items()):
        if bits >= size:
            return f"{bits / size:g} {prefix.upper()}"
    return f"{bits:g} "
