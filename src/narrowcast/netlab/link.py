"""What a rank's cable is like: `Link`, from words such as "1gbit" and "1ms".

Rates (rates.py) are those of the wire: of each 1,514-byte frame TCP carries 1,448 bytes, so a stream moves 95.6% of the
rate. A delay without a unit is refused, too: tc takes it for microseconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import NetlabError
from .rates import parse_rate, short

FRAME = 1514  # bytes of a full Ethernet frame at an MTU of 1,500, as tc counts it
PAYLOAD = 1448  # bytes of it that TCP carries, with timestamps
# A shaper passes whole packets, and TCP hands it up to 44 frames at once. Fewer make for a smoother link and more work:
# a quarter of a millisecond costs nothing at 1 Gbit/s (4 ranks, 2 cores), an eighth costs 2%, a sixteenth 22%.
PACKET_SECONDS = 250e-6
MOST_FRAMES = 44
# A port's queue beyond the cable's own content. Deep enough that no sender's stream is cut, as on a good switch.
QUEUE_SECONDS = 0.010

LEAST_RATE = 64_000
LOSS = re.compile(r"(\d+(?:\.\d+)?) ?%")
DELAY = re.compile(r"(\d+(?:\.\d+)?) ?(us|ms|s)", re.IGNORECASE)
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Link:
    """`rate` in bits a second (None: as fast as the machine), `delay` in seconds, one way, `loss` a probability."""

    rate: int | None = None
    delay: float = 0.0
    loss: float = 0.0

    @property
    def frames(self) -> int:
        """Frames that TCP may hand over as one packet. What is lost is lost whole, so with loss it is one."""
        if self.loss:
            return 1
        if self.rate is None:
            return MOST_FRAMES
        # What is late by a millisecond anyway need not be as smooth, and a delay line has half the work.
        seconds = max(PACKET_SECONDS, self.delay / 2)
        return min(max(2, int(self.rate / 8 * seconds / FRAME)), MOST_FRAMES)

    @property
    def burst(self) -> int:
        """Bytes an idle link passes at once: two packets, or half a millisecond, so that a late timer costs no rate."""
        return max(2 * self.frames * FRAME, int((self.rate or 0) / 8 * 2 * PACKET_SECONDS))

    @property
    def queue(self) -> int:
        """Bytes that may wait for the link: what a round trip holds, and QUEUE_SECONDS more."""
        return max(8 * self.frames * FRAME, int((self.rate or 0) / 8 * (QUEUE_SECONDS + 2 * self.delay)))

    def __str__(self) -> str:
        rate = "as fast as the machine" if self.rate is None else f"{short(self.rate)}bit/s each way"
        late = f", {self.delay * 1e3:g} ms one way" if self.delay else ""
        return f"{rate}{late}{f', {100 * self.loss:.3g}% of packets lost' if self.loss else ''}"


def parse_links(ranks: int, rate: str | None, delay: str | None, loss: str | None) -> list[Link]:
    """The cable of each rank. `rate` and `delay` are one for all, or one for each rank with commas between."""
    lost = parse_loss(loss) if loss else 0.0
    rates = [int(parse_rate("--rate", text, LEAST_RATE)) for text in rate.split(",")] if rate else [None]
    delays = [parse_delay(text) for text in delay.split(",")] if delay else [0.0]
    for option, given in (("--rate", rates), ("--delay", delays)):
        if len(given) not in (1, ranks):
            raise NetlabError(
                f"{option}: {len(given)} values for {ranks} ranks. Give one for all, or one for each rank, such as "
                "--ranks 2 --rate 1gbit,100mbit."
            )
    pairs = zip(rates * (ranks // len(rates)), delays * (ranks // len(delays)), strict=True)
    return [Link(*pair, lost) for pair in pairs]


def pair_delay(one: Link, other: Link) -> float:
    """Seconds from one rank to another: half of each cable's delay."""
    return (one.delay + other.delay) / 2


def parse_delay(text: str) -> float:
    match = DELAY.fullmatch(text.strip())
    delay = round(float(match[1]) * SECONDS[match[2].lower()], 9) if match else -1.0
    if not 0 <= delay <= 10:
        raise NetlabError(
            f"--delay {text!r}: a delay is a number and us, ms or s (one way), 10s at the most. "
            "Write, for example, --delay 1ms."
        )
    return delay


def parse_loss(text: str) -> float:
    match = LOSS.fullmatch(text.strip())
    loss = float(match[1]) / 100 if match else -1.0
    if not 0 <= loss <= 0.5:
        raise NetlabError(
            f"--loss {text!r}: the share of packets that are lost is a percentage, 50% at the most. Write, for "
            "example, --loss 0.1%."
        )
    return loss
