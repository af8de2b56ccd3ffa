"""Arrays in .npy files: floats that torch also has, read a part at a time, never a pickle.

The format has no name for bfloat16. numpy writes such an array as two bytes of no type ("V2"). Reading and writing one
is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from narrowcast.checkpoint.files import chunks
from narrowcast.errors import CheckpointError, DtypeError

FLOATS = ("float16", "float32", "float64")


class Array:
    """The array of a file."""

    def __init__(self, path: Path) -> None:
        array = _open(path)
        self.shape = array.shape
        self.dtype: torch.dtype = getattr(torch, array.dtype.newbyteorder("=").name)
        self._flat = array.reshape(-1) if array.flags.c_contiguous else array.flat

    def read(self, start: int, stop: int) -> Tensor:
        """The elements, in the order of C, from `start` to `stop`."""
        part = np.array(self._flat[start:stop])
        return torch.from_numpy(part.astype(part.dtype.newbyteorder("="), copy=False))


def _open(path: Path) -> Any:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        why = str(error).rstrip(".")
        raise CheckpointError(
            f"{path}: not a whole .npy file of numbers: {why}. It is truncated, or holds Python objects, which are "
            "not read. Write it again with numpy.save."
        ) from error
    if not isinstance(array, np.ndarray):
        raise CheckpointError(f"{path}: is a renamed .npz file of several arrays. Save each array with numpy.save.")
    if array.dtype.newbyteorder("=").name not in FLOATS:
        kind = array.dtype.newbyteorder("=").name
        usual = " The usual cause is bfloat16, which .npy has no name for." if array.dtype.kind == "V" else ""
        raise DtypeError(
            f"{path}: holds {kind}, and codecs take {', '.join(FLOATS)}.{usual} Save it as "
            'array.astype("float32"), or as .safetensors, which has bfloat16.'
        )
    return array


def check_dtype(dtype: torch.dtype, name: str) -> None:
    """Refuse what a .npy file cannot hold."""
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError as error:
        raise DtypeError(
            f"{name!r} is {str(dtype).removeprefix('torch.')}, which .npy has no name for. Add --dtype float32, or "
            "write a .safetensors file."
        ) from error


def write(file: BinaryIO, dtype: torch.dtype, shape: tuple[int, ...], tiles: Iterable[Tensor]) -> None:
    """Write an array, tile by tile."""
    kind = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    about = {"descr": np.lib.format.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, about)
    for tile in tiles:
        for chunk in chunks(tile):
            file.write(chunk)
