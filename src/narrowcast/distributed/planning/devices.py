"""GPUs by name, for plans of machines that are not here.

Coding is bound by memory: on an H200 most operations take as long as a copy of the same bytes (bench/results/
gpu-h200.md). So the seconds of an element on another GPU are those of the H200, times the ratio of the published memory
bandwidths. Only the H200's were measured; the others are derived, and whoever shows them says so.

Only codecs that were timed on the H200 have a speed here. Options of a codec do not change it, which is near for blocks
of 32 elements and more, and wrong for `block=row` (twice the time of encoding) and `stochastic=true` (1.3 times).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from narrowcast.codecs import Codec
from narrowcast.distributed.planning.codec_speed import CodecSpeed, noise_of
from narrowcast.errors import SpecError

MEASURED = "H200"


@dataclass(frozen=True)
class Device:
    """A GPU, as its maker describes it."""

    name: str
    memory_gb_per_s: float
    """Published memory bandwidth."""
    local_gbit_per_s: float
    """To other GPUs of the host, each way: NVLink where it has one, else its PCIe slot. Published."""


PCIE_3, PCIE_4, PCIE_5 = 126, 252, 504
"""Gbit/s of 16 lanes, each way."""

DEVICES = {
    device.name: device
    for device in (
        Device("B200", 8000, 7200),
        Device("H200", 4800, 3600),
        Device("H100", 3350, 3600),
        Device("H100-PCIe", 2000, PCIE_5),
        Device("A100", 2039, 2400),
        Device("A100-40GB", 1555, 2400),
        Device("V100", 900, 1200),
        Device("L40S", 864, PCIE_4),
        Device("L4", 300, PCIE_4),
        Device("A40", 696, PCIE_4),
        Device("A10", 600, PCIE_4),
        Device("T4", 300, PCIE_3),
        Device("RTX-6000-Ada", 960, PCIE_4),
        Device("RTX-A6000", 768, PCIE_4),
        Device("RTX-5090", 1792, PCIE_5),
        Device("RTX-4090", 1008, PCIE_4),
        Device("RTX-3090", 936, PCIE_4),
    )
}
"""From the makers' data sheets: SXM modules where a name has several forms."""

ALIASES = {"a10g": "A10", "a10080gb": "A100", "h100sxm": "H100", "a100sxm": "A100"}

ELEMENTS = 1 << 28
H200_MS = {
    "raw": (0.527, 0.507, 2.151),
    "bf16": (0.370, 0.392, 1.075),
    "fp16": (0.371, 0.391, 1.075),
    "fp8_e4m3": (0.308, 0.336, 0.661),
    "fp8_e5m2": (0.308, 0.336, 0.661),
    "int8": (0.307, 0.336, 0.606),
    "int6": (0.445, 0.321, 0.919),
    "int5": (0.358, 0.314, 0.879),
    "int4": (0.284, 0.308, 0.345),
    "int3": (0.275, 0.302, 0.679),
    "int2": (0.263, 0.298, 0.349),
    "sign": (0.354, 0.296, 0.500),
    "nf4": (0.277, 0.308, 0.471),
    "apot4": (0.277, 0.308, 0.408),
    "apot8": (0.504, 0.335, 1.210),
    "pot5": (0.511, 0.314, 1.014),
}
"""Milliseconds of encoding and decoding `ELEMENTS`, and of adding up 8 rows of them, in bench/results/gpu-h200.md.
fp8_e5m2 with blocks was not timed: it has the bytes of fp8_e4m3, and its time."""

H200_COPY_BYTES_PER_S = 4.23e12
ROWS = 8


def find_device(name: str) -> Device:
    """The device of a name, however it is spelled: "H100", "rtx 4090", "NVIDIA A100"."""
    wanted = _plain(name)
    for device in DEVICES.values():
        if _plain(device.name) in (wanted, _plain(ALIASES.get(wanted, ""))):
            return device
    raise SpecError(f"device={name!r}: is not a GPU that is known here. Known are {', '.join(DEVICES)}.")


def derived_speeds(codecs: Iterable[Codec], device: Device) -> dict[str, CodecSpeed]:
    """The speed of each codec on a device, by its spec. Nothing is measured but the codecs' noise."""
    slower = DEVICES[MEASURED].memory_gb_per_s / device.memory_gb_per_s
    add_s = slower * 12 / H200_COPY_BYTES_PER_S  # two numbers are read, one is written
    speeds = {}
    for codec in codecs:
        if codec.name not in H200_MS:
            raise SpecError(
                f"codec={codec.spec!r}: was not timed on a GPU, so its speed on {device.name} cannot be derived. "
                f"Choose from {', '.join(H200_MS)}, or plan where the GPU is."
            )
        encode, decode, of_rows = (1e-3 * slower * each / ELEMENTS for each in H200_MS[codec.name])
        speeds[codec.spec] = CodecSpeed(encode, of_rows / ROWS, decode, add_s, noise_of(codec))
    return speeds


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|rtx|[^a-z0-9]", "", name.lower())
