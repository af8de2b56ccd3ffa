"""The examination of `narrowcast doctor`: versions, the machine, the kernels, whether bytes agree, and what is wrong.

A fault makes results wrong, kernels slower than the machine allows, or a part of narrowcast unusable. A hint is an
optional package. Both come with the command that fixes them. Nothing is changed, and no other machine is asked.
"""

from __future__ import annotations

import os
import platform
import re
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import narrowcast
from narrowcast.cli.doctor import agreement
from narrowcast.codecs import list_codecs, which_kernel
from narrowcast.errors import KernelWarning
from narrowcast.kernels import triton as triton_kernels
from narrowcast.kernels.cpu import binding
from narrowcast.kernels.cpu.reinstall import reinstall_command

PACKAGES = ("torch", "numpy", "safetensors", "typer", "rich", "triton")
EXTRAS = {
    "plot": ("figures: narrowcast inspect --plot", ("matplotlib",)),
    "hf": ("transformers and accelerate", ("accelerate", "compressed-tensors", "transformers")),
    "lightning": ("Lightning", ("lightning",)),
    "onnx": ("export to ONNX", ("onnx", "onnxscript")),
    "track": ("TensorBoard logs", ("tensorboard",)),
}

OLDEST = (2, 11)
"""The first torch that is supported, as in pyproject.toml."""
_FEATURES = re.compile(r"avx2|avx512(f|bw|vl|_vnni|_bf16|_fp16)|amx_(int8|bf16|tile)|f16c|fma|asimd|sve2?|i8mm|bf16")


class Finding(NamedTuple):
    """A fault or a hint, and the command that fixes it."""

    what: str
    fix: str


def examine(advance: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """The whole report. `advance` is called after each codec of each kernel that is checked."""
    faults, hints = [*_torch_faults(), *_kernel_faults(), *_backend_faults()], _hints()
    checks, wrong = _compare_kernels(advance)
    faults += wrong
    return {
        "ok": not faults,
        "versions": versions(),
        "machine": machine(),
        "backends": backends(),
        "kernels": kernels(),
        "checks": checks,
        "faults": [fault._asdict() for fault in faults],
        "hints": [hint._asdict() for hint in hints],
    }


def versions() -> dict[str, str | None]:
    """The versions of narrowcast, Python and the packages that narrowcast uses; None where one is not installed."""
    names = [*PACKAGES, *(name for _, packages in EXTRAS.values() for name in packages)]
    own = {"narrowcast": narrowcast.__version__, "python": platform.python_version()}
    return {**own, **{name: _version(name) for name in names}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """The processor and the GPUs."""
    name, features = _processor()
    gpus = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(number)
            capability = f"{gpu.major}.{gpu.minor}"
            gpus.append({"name": gpu.name, "capability": capability, "bytes": gpu.total_memory})
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "features": features,
        "gpus": gpus,
        "cuda": torch.version.cuda,
    }


def _processor() -> tuple[str, list[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), []
    name = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", text, re.MULTILINE)
    features = [flag for flag in flags[1].split() if _FEATURES.fullmatch(flag)] if flags else []
    return name[1] if name else platform.machine(), features


def backends() -> dict[str, bool]:
    """Which backends of torch.distributed this torch has."""
    if not dist.is_available():
        return {"gloo": False, "nccl": False, "mpi": False}
    return {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}


def kernels() -> dict[str, dict[str, str]]:
    """Which kernel runs each codec, on each kind of device of this machine."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KernelWarning)  # reported as a fault
        return {name: {device: _kernel(name, device) for device in devices} for name in list_codecs()}


def _kernel(codec: str, device: str) -> str:
    try:
        return which_kernel(codec, device)
    except (OSError, AttributeError):
        return "broken"  # reported as a fault, with the reason


# -- faults and hints -------------------------------------------------------------------------------------------------


def _torch_faults() -> list[Finding]:
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if version >= OLDEST:
        return []
    wanted = ".".join(map(str, OLDEST))
    return [Finding(f"torch {torch.__version__} is older than {wanted}", f"pip install 'torch>={wanted}'")]


def _kernel_faults() -> list[Finding]:
    wanted = os.environ.get("NARROWCAST_KERNEL", "")
    if wanted == "reference":
        what = "NARROWCAST_KERNEL=reference is set: the plain-torch reference runs, which is right but slow"
        return [Finding(what, "unset NARROWCAST_KERNEL")]
    wrong = _core_faults(wanted)
    if torch.cuda.is_available():
        triton, why = triton_kernels.load()
        wrong += [] if triton else [_slow("cuda", why)]
    return wrong


def _core_faults(wanted: str) -> list[Finding]:
    try:
        core, why = binding.load(wanted.removeprefix("native/"))
    except (OSError, AttributeError) as error:
        fix = "unset NARROWCAST_CORE" if "NARROWCAST_CORE" in os.environ else reinstall_command()
        return [Finding(f"the native core cannot be loaded, and no codec runs on the CPU: {error}", fix)]
    return [] if core else [_slow("cpu", why, "unset NARROWCAST_KERNEL" if wanted else "")]


def _slow(device: str, why: str, fix: str = "") -> Finding:
    """A fault from a kernel's own message: the reason, and after the last colon the command that fixes it."""
    if not fix:
        what, _, fix = why.rpartition(": ")
        why = re.sub(r"\.? (and run|Run|Install it with)$", "", what)
    return Finding(f"the plain-torch reference runs on {device}, which is right but slow: {why}", fix)


def _backend_faults() -> list[Finding]:
    available = backends()
    needed = ["gloo", *(["nccl"] if torch.cuda.is_available() else [])]
    return [
        Finding(f"this torch has no {name}, so no process group runs on {where}", "pip install --force-reinstall torch")
        for name, where in zip(needed, ("the CPU", "GPUs"), strict=False)
        if not available[name]
    ]


def _compare_kernels(advance: Callable[[], object]) -> tuple[list[dict[str, Any]], list[Finding]]:
    """Whether each kernel gives the reference's bytes."""
    checks: list[dict[str, Any]] = []
    wrong: list[Finding] = []
    for kernel, device in compiled():
        try:
            differ = agreement.find_differences(kernel, device, advance)
        except Exception as error:  # of any kind: from a driver, a compiler, a library
            differ = [("all", f"raises {type(error).__name__}: {error}")]
        tried = {"settings": len(agreement.specs()), "codecs": len(list_codecs())}
        checks.append({"kernel": kernel.name, "device": device.type, **tried, "differ": differ})
        if differ:
            some = "; ".join(f"{spec} ({difference})" for spec, difference in differ[:3])
            what = f"{kernel.name} and the reference disagree in {len(differ)} settings: {some}"
            fix = "export NARROWCAST_KERNEL=reference, and report the output of narrowcast doctor --json"
            wrong.append(Finding(what, fix))
    return checks, wrong


def compiled() -> list[tuple[Any, torch.device]]:
    """The kernels to check; none where the core cannot be loaded, which is reported as a fault."""
    try:
        return list(agreement.kernels())
    except (OSError, AttributeError):
        return []


def _hints() -> list[Finding]:
    hints = []
    for extra, (use, packages) in EXTRAS.items():
        missing = [name for name in packages if _version(name) is None]
        if missing:
            hints.append(Finding(f"{use}: {', '.join(missing)} not installed", f"pip install 'narrowcast[{extra}]'"))
    if Path("/proc/driver/nvidia/version").exists() and torch.version.cuda is None:
        index = "https://download.pytorch.org/whl/cu130"
        hints.append(
            Finding("there is an NVIDIA driver, but this torch has no CUDA", f"pip install torch --index-url {index}")
        )
    return hints
