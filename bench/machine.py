"""The machine, the software and the command, for the head of a results file."""

from __future__ import annotations

import os
import platform
import sys
from datetime import date
from pathlib import Path

import torch

import narrowcast as nc

BUSY = os.getloadavg()[0]  # before the benchmark itself loads the machine


def facts(**entries: str) -> dict[str, str]:
    """Values by their titles, for one line each."""
    command = f"PYTHONPATH=src python {' '.join(sys.argv)}"
    return {"date": str(date.today()), "CPU": _processor(), "software": _software(), **entries, "command": command}


def sentence() -> str:
    """The same as one sentence, without the command."""
    return f"{date.today()}, {_processor()}, {_software()}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    name = names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, load {BUSY:.1f} at the start"


def _software() -> str:
    return f"torch {torch.__version__}, Python {platform.python_version()}, kernel {nc.which_kernel('int8')}"
