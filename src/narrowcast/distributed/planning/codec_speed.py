"""How fast codecs are here: seconds an element, of the operations that a reduction is made of.

They are timed on the spot, on random numbers, with the threads that torch has. A time is the mean of what fits into
some milliseconds: ranks that share a machine share its cores when it counts, too. All codecs take turns, and the best
of their turns holds. In a group all ranks measure at once, and the slowest one's numbers are everyone's.

`noise` is what a codec leaves on normal numbers, as a share of their power: the measure by which codecs are more or
less precise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.distributed.planning.link import finish, slowest
from narrowcast.distributed.transport.group import Group

WINDOW_S, TURNS = 0.005, 5
"""A window is longer than a scheduler lets one process have a core that another waits for, 3 or 4 ms."""

NUMEL = {"cpu": 1 << 22, "cuda": 1 << 23}
"""What is encoded at a time: more than caches hold, as gradients are."""

MOST_ROWS = 8
"""Rows are summed that many at a time, or as many as there are ranks. More take as long each."""


@dataclass(frozen=True)
class CodecSpeed:
    """Seconds an element."""

    encode_s: float
    sum_s: float
    """Of every row that is added up, with its share of encoding the sum."""
    decode_s: float
    add_s: float
    """Of adding one tensor to another, which error feedback does."""
    noise: float
    """Mean squared error over mean square, on normal numbers. No time."""


def measure_codecs(
    codecs: Iterable[Codec],
    device: torch.device | str = "cpu",
    *,
    ranks: int = MOST_ROWS,
    group: Group | None = None,
) -> dict[str, CodecSpeed]:
    """The speed of each codec on `device`, by its spec; with `group`, a collective whose result is the same on all."""
    where = torch.device(device)
    x = torch.randn(
        _numel(where), dtype=torch.float32, device="cpu", generator=torch.Generator("cpu").manual_seed(0)
    ).to(where)
    out = torch.empty_like(x)
    runs = {codec.spec: _operations(codec, x, out, max(2, min(ranks, MOST_ROWS))) for codec in codecs}
    if group is not None:
        slowest(group, [0.0])  # all at once, as in a reduction
    times: dict[str, list[list[float]]] = {spec: [] for spec in runs}
    for _ in range(TURNS):
        for spec, (operations, _) in runs.items():
            times[spec].append([_seconds(run, where) for run in operations])
    measured = [
        [*(min(seconds) / len(x) for seconds in zip(*times[spec], strict=True)), noise]
        for spec, (_, noise) in runs.items()
    ]
    if group is not None:
        agreed = slowest(group, [value for values in measured for value in values], f", codecs={','.join(runs)}")
        measured = [agreed[i * len(values) : (i + 1) * len(values)] for i, values in enumerate(measured)]
    return {spec: CodecSpeed(*values) for spec, values in zip(runs, measured, strict=True)}


def _operations(codec: Codec, x: Tensor, out: Tensor, rows: int) -> tuple[list[Callable[[], object]], float]:
    """What is timed, in the order of `CodecSpeed`; and the noise."""
    numel = len(x)
    part = numel // rows
    encoded = codec.encode(x, 0)
    parts = codec.encode(x[: rows * part].view(rows, part), 0)
    total = torch.empty_like(parts[0])
    codec.decode(encoded, numel, out=out)
    noise = _noise(x, out)
    return [
        lambda: codec.encode(x, 0, out=encoded),
        lambda: codec.decode_sum_encode(parts, part, 0, own=x[:part], own_rank=0, divisor=rows, out=total),
        lambda: codec.decode(encoded, numel, out=out),
        lambda: torch.add(x, out, out=out),
    ], noise


def noise_of(codec: Codec) -> float:
    """The noise of a codec, where its speed is known already."""
    x = torch.randn(1 << 16, dtype=torch.float32, device="cpu", generator=torch.Generator("cpu").manual_seed(0))
    return _noise(x, codec.decode(codec.encode(x, 0), len(x)))


def _noise(x: Tensor, decoded: Tensor) -> float:
    some = slice(0, 1 << 16)
    error = decoded[some] - x[some]
    return float(error.double().square().mean() / x[some].double().square().mean())


def _numel(device: torch.device) -> int:
    return NUMEL.get(device.type, NUMEL["cpu"])


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The mean of as many runs as fit into the window."""
    finish(device)
    count, batch, start = 0, 1, time.perf_counter()
    while True:
        for _ in range(batch):
            run()
        finish(device)
        count += batch
        elapsed = time.perf_counter() - start
        if elapsed >= WINDOW_S:
            return elapsed / count
        batch *= 2  # a device is kept busy, not asked each time whether it is done
