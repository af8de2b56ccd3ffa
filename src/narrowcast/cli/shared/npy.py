"""Arrays in .npy files: floats that torch also has, mapped, never a pickle.

The format has no name for bfloat16. numpy writes such an array as two bytes of no type ("V2"). Reading and writing one
is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from narrowcast.errors import CheckpointError, DtypeError

FLOATS = ("float16", "float32", "float64")


def read(path: Path) -> Tensor:
    """Map the array of a file."""
    try:
        # "c" is copy on write. Nothing writes to the array, but torch warns of memory that is read-only.
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, EOFError) as error:
        why = str(error).rstrip(".")
        raise CheckpointError(
            f"{path}: not a whole .npy file of numbers: {why}. It is truncated, or holds Python objects, which are "
            "not read. Write it again with numpy.save."
        ) from error
    if not isinstance(array, np.ndarray):
        raise CheckpointError(f"{path}: is a renamed .npz file of several arrays. Save each array with numpy.save.")
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    if native.dtype.name not in FLOATS:
        usual = " The usual cause is bfloat16, which .npy has no name for." if native.dtype.kind == "V" else ""
        raise DtypeError(
            f"{path}: holds {native.dtype.name}, and codecs take {', '.join(FLOATS)}.{usual} Save it as "
            'array.astype("float32"), or as .safetensors, which has bfloat16.'
        )
    return torch.from_numpy(native)


def check_dtype(dtype: torch.dtype, name: str) -> None:
    """Refuse what a .npy file cannot hold."""
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError as error:
        raise DtypeError(
            f"{name!r} is {str(dtype).removeprefix('torch.')}, which .npy has no name for. Add --dtype float32, or "
            "write a .safetensors file."
        ) from error


def write(file: BinaryIO, tensor: Tensor) -> None:
    """Write an array."""
    np.lib.format.write_array(file, tensor.contiguous().numpy(), allow_pickle=False)
