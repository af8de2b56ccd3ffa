"""Error against bytes, for every block size and scale format: the measurement behind the defaults.

    PYTHONPATH=src python bench/defaults.py            prints the markdown tables of docs/defaults.md

A configuration's *net* dB is its signal-to-error ratio less 6.02 dB for every bit per element that its scales take:
what it would cost to buy the same error with wider codes. Configurations of different size can be compared by it.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import narrowcast as nc
from data import gaussian, laplace, real, sqnr

WIDTHS = (1, 2, 3, 4, 5, 6, 8)
BLOCKS = (16, 32, 64, 128, 256, 512)
SCALES = ("fp32", "bf16", "fp16", "e8m0")
BIT = 6.0206
TABLES = ("nf4", "apot4", "pot4", "apot3", "apot6", "apot8", "fp8_e4m3")


def name_of(bits: int) -> str:
    return "sign" if bits == 1 else f"int{bits}"


def measured(spec: str, sources: dict[str, Tensor]) -> list[float]:
    """SQNR in dB on each source."""
    return [sqnr(x, nc.decode(nc.encode(x, spec))) for x in sources.values()]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def width_tables(bits: int, sources: dict[str, Tensor]) -> dict[tuple[int, str], float]:
    """Print one width's table; return the net dB of every configuration."""
    default = nc.codec(name_of(bits))
    net = {}
    print(f"### {bits} bit{'s' if bits > 1 else ''} (`{name_of(bits)}`, default `block={default.block}`)\n")
    print("| block | " + " | ".join(f"{scale}: bits" + " | dB" for scale in SCALES) + " |")
    print("|---:|" + "---:|---|" * len(SCALES))
    for block in BLOCKS:
        cells = [str(block)]
        for scale in SCALES:
            codec = nc.codec(f"{name_of(bits)}:block={block},scale={scale}")
            ratios = measured(codec.spec, sources)
            net[block, scale] = mean(ratios) - BIT * (codec.bits_per_element() - bits)
            text = " ".join(f"{value:.1f}" for value in ratios)
            cells += [f"{codec.bits_per_element():.3f}", f"**{text}**" if codec == default else text]
        print("| " + " | ".join(cells) + " |")
    print()
    return net


def net_table(nets: dict[int, dict[tuple[int, str], float]]) -> None:
    """Every width's net dB, relative to its default; and the best configuration."""
    competitors = ((32, "bf16"), (64, "bf16"), (128, "bf16"), (128, "fp32"), (32, "e8m0"))
    head = " | ".join(f"{block} {scale}" for block, scale in competitors)
    print(f"| bits | default | net dB | best | gain of the best | {head} |")
    print("|---:|---|---:|---|---:|---:|---:|---:|---:|---:|")
    for bits, net in nets.items():
        codec = nc.codec(name_of(bits))
        scale = SCALES[int(codec.format.scale) - 1]
        base = net[codec.format.block, scale]
        best = max(net, key=lambda key: net[key])
        shown = " | ".join(f"{net[key] - base:+.2f}" for key in competitors)
        choice = f"{best[0]} {best[1]} | {net[best] - base:+.2f}"
        print(f"| {bits} | {codec.block} {scale} | {base:.2f} | {choice} | {shown} |")
    print()


def symmetric(bits: int, block: int, scale_dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The competitor: codes from -(2**(bits-1) - 1) to 2**(bits-1) - 1 and a positive scale, in plain torch."""
    top = 2 ** (bits - 1) - 1

    def both_ways(x: Tensor) -> Tensor:
        blocks = torch.nn.functional.pad(x, (0, -len(x) % block)).view(-1, block)
        exact = blocks.abs().amax(1, keepdim=True) / top
        scale = exact.to(scale_dtype)
        scale = torch.where(scale.float() < exact, scale * (1 + torch.finfo(scale_dtype).eps), scale).float()
        return ((blocks / scale.clamp(min=2.0**-126)).round().clamp(-top, top) * scale).flatten()[: len(x)]

    return both_ways


def signed_gain(sources: dict[str, Tensor]) -> None:
    print("| codec | " + " | ".join(f"{name}: symmetric | signed scale | gain" for name in sources) + " |")
    print("|---|" + "---:|---:|---:|" * len(sources))
    for bits in WIDTHS[1:]:
        codec = nc.codec(f"int{bits}")
        competitor = symmetric(bits, codec.format.block, torch.bfloat16 if bits <= 4 else torch.float32)
        cells = []
        for x, ours in zip(sources.values(), measured(codec.spec, sources), strict=True):
            theirs = sqnr(x, competitor(x))
            cells.append(f"{theirs:.2f} | {ours:.2f} | {ours - theirs:+.2f}")
        print(f"| int{bits} | " + " | ".join(cells) + " |")
    print()


def others(sources: dict[str, Tensor]) -> None:
    """The other families at their defaults, and the options that change error."""
    print("| codec | bits per element | " + " | ".join(sources) + " |")
    print("|---|---:|" + "---:|" * len(sources))
    variants = (*(f"int{bits}:zero_point=true" for bits in (4, 8)), "int4:stochastic=true", "fp8_e4m3:scale=none")
    for spec in (*(name_of(bits) for bits in WIDTHS), *TABLES, *variants):
        ratios = " | ".join(f"{value:.1f}" for value in measured(spec, sources))
        print(f"| {spec} | {nc.codec(spec).bits_per_element():.3f} | {ratios} |")
    print()


def main() -> int:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    trained, narrow = real(128), real(96)
    count = len(trained.gradients)
    sources = {
        "Gaussian": gaussian(count),
        "Laplace": laplace(count),
        "gradients": trained.gradients,
        "gradients of width 96": narrow.gradients,
        "weights": trained.weights,
    }
    sizes = ", ".join(f"{name}: {len(x):,}" for name, x in sources.items())
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {nc.which_kernel('int8')}. {sizes}.")
    print(f"The model's loss fell from {trained.loss[0]:.2f} to {trained.loss[1]:.2f} nats per byte.\n")
    print("dB columns: " + ", ".join(sources) + ". Bold: the default.\n")
    nets = {bits: width_tables(bits, sources) for bits in WIDTHS}
    print("### Net of the scales' bytes\n")
    net_table(nets)
    print("### Signed scales against symmetric codes\n")
    signed_gain(sources)
    print("### Every family\n")
    others(sources)
    return 0


if __name__ == "__main__":
    sys.exit(main())
