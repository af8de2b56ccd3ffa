"""CUDA, compiled when it is first needed.

NVRTC comes with torch and the driver with the GPU, so nothing else has to be installed. A `Function` is a compiled
kernel on one device; it is launched on the current stream, in a CUDA graph too (call it once before capturing, so that
it is compiled).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char, c_char_p, c_int, c_longlong, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

DYNAMIC_SHARED = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"""


PROGRAMMATIC_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"""


MAP_BYTES, MAP_ALIGNMENT = 128, 64
"""Of a CUtensorMap."""

L2_256_BYTES = 3
"""CU_TENSOR_MAP_L2_PROMOTION_L2_256B"""


class Attribute(ctypes.Structure):
    """CUlaunchAttribute, with the one value that is used here."""

    _fields_ = (("id", c_int), ("padding", c_int), ("value", c_int), ("rest", c_int * 15))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_int * 3),
        ("block", c_int * 3),
        ("shared", c_int),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", c_int),
    )


class Function:
    """One kernel, loaded on one device. It must wait for the kernel before it (griddepcontrol) where `early` is set."""

    def __init__(self, handle: c_void_p, early: bool) -> None:
        self._handle = handle
        self._shared = 0
        self._attribute = Attribute(PROGRAMMATIC_SERIALIZATION, 0, 1)
        self._count = int(early)

    def __call__(self, grid: int, threads: int, shared: int, arguments: Sequence[Argument]) -> None:
        """Launch on the current stream: tensors and None go as addresses, `Int` as 32 bits, other integers as 64."""
        driver = _driver()
        if shared > self._shared:
            _check(driver.cuFuncSetAttribute(self._handle, DYNAMIC_SHARED, shared))
            self._shared = shared
        values = [_value(argument) for argument in arguments]
        pointers = (c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = torch.cuda.current_stream().cuda_stream
        attributes = ctypes.pointer(self._attribute)
        config = Config((grid, 1, 1), (threads, 1, 1), shared, stream, attributes, self._count)
        _check(driver.cuLaunchKernelEx(byref(config), self._handle, pointers, None))


class Int(int):
    """An argument of 32 bits."""


class Boxes(NamedTuple):
    """A tensor [rows, ..] of which a kernel copies boxes (`Map` of instructions.cuh): the first `end` bytes of each
    row, `line` bytes of `height` rows at a time."""

    tensor: Tensor
    end: int
    line: int
    height: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """The address, rows, bytes from row to row, and what a box is."""
        rows, apart = len(self.tensor), self.tensor.stride(0) * self.tensor.element_size()
        return self.tensor.data_ptr(), rows, apart if rows > 1 else -(-self.end // 16) * 16, *self[1:]


Argument = Tensor | Boxes | int | None


@lru_cache(maxsize=4096)
def _map(address: int, rows: int, apart: int, end: int, line: int, height: int) -> ctypes.Array[c_char]:
    """CUtensorMap of a tensor of bytes, in which sixteens of `line` bytes are exchanged as `copy_box` says."""
    memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    aligned = -ctypes.addressof(memory) % MAP_ALIGNMENT
    encoded = (c_char * MAP_BYTES).from_buffer(memory, aligned)
    sizes, strides = (c_uint64 * 2)(end, rows), (c_uint64 * 1)(apart)
    box, each, exchange = (c_uint32 * 2)(line, height), (c_uint32 * 2)(1, 1), {32: 1, 64: 2, 128: 3}[line]
    encode = _driver().cuTensorMapEncodeTiled
    _check(encode(encoded, 0, 2, c_void_p(address), sizes, strides, box, each, 0, exchange, L2_256_BYTES, 0))
    return encoded


def _value(argument: Argument) -> ctypes._SimpleCData[int] | c_void_p | ctypes.Array[c_char]:
    if isinstance(argument, Boxes):
        return _map(*argument.numbers)
    if argument is None or isinstance(argument, Tensor):
        return c_void_p(None if argument is None else argument.data_ptr())
    return c_int(argument) if isinstance(argument, Int) else c_longlong(argument)


@cache
def function(
    sources: tuple[Path, ...], name: str, defines: tuple[tuple[str, int], ...], device: int, early: bool = False
) -> Function:
    """Compile the kernel `name` of these files, end to end, with these macros set, for the current device.

    `early` lets it start while the kernel before it in the stream ends; it has to wait for that one itself.
    """
    text = "".join(f"#define {key} {value}\n" for key, value in defines) + "".join(file.read_text() for file in sources)
    major, minor = torch.cuda.get_device_capability(device)
    # "a": with wgmma, which only Hopper has.
    image = _compile(text, sources[-1].name, f"--gpu-architecture=sm_{major}{minor}{'a' if major == 9 else ''}")
    torch.cuda.current_stream()  # makes sure that the device has a context
    module, handle = c_void_p(), c_void_p()
    _check(_driver().cuModuleLoadData(byref(module), image))
    _check(_driver().cuModuleGetFunction(byref(handle), module, name.encode()))
    return Function(handle, early and major >= 9)


def missing() -> str:
    """Why nothing can be compiled here, or an empty string."""
    try:
        _nvrtc(), _driver()
    except OSError as error:
        return str(error)
    return ""


def _compile(text: str, name: str, *options: str) -> bytes:
    rtc, program = _nvrtc(), c_void_p()
    given = (c_char_p * len(options))(*(option.encode() for option in options))
    if rtc.nvrtcCreateProgram(byref(program), text.encode(), name.encode(), 0, None, None):
        raise RuntimeError(f"NVRTC could not start on {name}")
    try:
        failed = rtc.nvrtcCompileProgram(program, len(options), given)
        if failed:
            raise RuntimeError(f"NVRTC could not compile {name}:\n{_read(rtc, program, 'ProgramLog').decode()}")
        return _read(rtc, program, "CUBIN")
    finally:
        rtc.nvrtcDestroyProgram(byref(program))


def _read(rtc: ctypes.CDLL, program: c_void_p, what: str) -> bytes:
    size = c_size_t()
    rtc[f"nvrtcGet{what}Size"](program, byref(size))
    text = ctypes.create_string_buffer(size.value)
    rtc[f"nvrtcGet{what}"](program, text)
    return text.raw


@cache
def _nvrtc() -> ctypes.CDLL:
    major = str(torch.version.cuda).split(".")[0]
    name = f"libnvrtc.so.{major}"
    beside = Path(torch.__file__).parent.parent / "nvidia"
    for path in (name, *sorted(str(file) for file in beside.glob(f"**/{name}"))):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise OSError(f"{name}, which comes with torch's GPU builds, was not found")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(failed: int) -> None:
    if failed:
        said = c_char_p()
        _driver().cuGetErrorString(failed, byref(said))
        raise RuntimeError(f"CUDA: {said.value.decode() if said.value else failed}")
