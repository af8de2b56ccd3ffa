"""Integer convolutions beside torch's float ones: 4-bit APoT weights and inputs, packed, on a CPU.

    .venv/bin/python bench/integer_conv.py [--threads 1] [--rounds 15]

Times are processor time, the least of several rounds of 8 calls, float and integer by turns in the same process.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import narrowcast as nc

# batch, size, channels, outputs, kernel, stride, padding: ResNet-20 on CIFAR-10, then ResNet-50 on ImageNet
LAYERS = [
    *((batch, *layer) for batch in (1, 16, 128) for layer in ((32, 16, 16, 3, 1, 1), (8, 64, 64, 3, 1, 1))),
    (16, 16, 32, 32, 3, 1, 1),
    (16, 32, 16, 32, 3, 2, 1),
    (16, 32, 16, 32, 1, 2, 0),
    (1, 56, 64, 64, 3, 1, 1),
    (8, 56, 64, 64, 3, 1, 1),
    (8, 28, 128, 128, 3, 1, 1),
    (8, 14, 256, 256, 3, 1, 1),
    (8, 56, 64, 256, 1, 1, 0),
    (4, 224, 3, 64, 7, 2, 3),
]

CALLS = 8


def milliseconds(layer: nn.Module, x: torch.Tensor) -> float:
    start = time.process_time_ns()
    for _ in range(CALLS):
        layer(x)
    return (time.process_time_ns() - start) / CALLS * 1e-6


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads, {nc.which_kernel('apot4', 'cpu')}\n")
    print("| batch | input | layer | float, ms | integer, ms | times faster |")
    print("|---:|---|---|---:|---:|---:|")
    for batch, size, channels, outputs, kernel, stride, padding in LAYERS:
        torch.manual_seed(0)
        plain = nn.Conv2d(channels, outputs, kernel, stride, padding, bias=False).eval()
        integer = nn.Conv2d(channels, outputs, kernel, stride, padding, bias=False)
        x = torch.rand(batch, channels, size, size)
        nc.prepare_qat_(integer, "apot4", "apot4")
        nc.calibrate_(integer, [x])
        nc.convert_(integer.eval())
        pairs = [(milliseconds(plain, x), milliseconds(integer, x)) for _ in range(options.rounds)]
        floats, integers = (min(times) for times in zip(*pairs, strict=True))
        layer = f"{kernel}x{kernel} to {outputs}, stride {stride}"
        ratio = floats / integers
        print(
            f"| {batch} | {channels}x{size}x{size} | {layer} | {floats:.3f} | {integers:.3f} | {ratio:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
