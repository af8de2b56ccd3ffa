"""Triton: launches that were made before are made again without asking Triton.

Triton looks at each of a kernel's forty arguments in every launch, to find the code that was compiled for them. That
took more of the host's time than all else in a small operation. What it goes by is the dtypes, the constants, the sizes
and whether pointers are multiples of 16. All of it is in the key of a `Launches`, so a second call with the same key
takes the same code, and only the addresses differ.

What is remembered is what `JITFunction.run` hands to the compiled kernel, in Triton 3.6 and in 3.9. Another version
goes through Triton, as every first call does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from narrowcast.kernels.layout import Recipe
from narrowcast.kernels.triton.arguments import on
from narrowcast.kernels.triton.codes import INTERPRETED

REMEMBERED = 4096
"""So many keys; then all are forgotten, and asked for again as they come."""

_DIRECT = not INTERPRETED and (3, 6) <= tuple(int(n) for n in triton.__version__.split(".")[:2]) <= (3, 9)

Key = tuple[object, ...]

_known: dict[Key, Launches] = {}


class Launches:
    """The launches of an operation on tensors of one kind. `recipe` is kept, so that its table is not another's."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._launches: list[tuple[Any, int, list[Any], list[tuple[int, str]]]] = []

    def launch(self, kernel: Any, programs: int, arguments: Mapping[str, Any], tensors: Mapping[str, str]) -> None:
        """Launch a kernel, and remember it. `tensors` says which of the caller's an argument is a view of."""
        compiled = kernel[(programs,)](**arguments)
        if _DIRECT:
            values = [arguments[name] for name in kernel.arg_names]
            slots = [(i, tensors[name]) for i, name in enumerate(kernel.arg_names) if name in tensors]
            for i, _ in slots:
                values[i] = 0
            self._launches.append((compiled, programs, values, slots))

    def again(self, device: torch.device, addresses: Mapping[str, int]) -> None:
        """Make all launches again, on other tensors of the same kind."""
        if torch.cuda.current_device() != device.index:
            with on(device):
                self.again(device, addresses)
            return
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        hooks = triton.knobs.runtime
        for compiled, programs, template, slots in self._launches:
            values = template.copy()  # other threads launch it, too
            for i, name in slots:
                values[i] = addresses[name]
            about = compiled.launch_metadata((programs,), stream, *values)
            compiled.run(
                programs, 1, 1, stream, compiled.function, compiled.packed_metadata, about,
                hooks.launch_enter_hook, hooks.launch_exit_hook, *values,
            )  # fmt: skip


def repeated(key: Key, device: torch.device, addresses: Mapping[str, int]) -> bool:
    """Make the launches of a key again; whether there are any."""
    launches = _known.get(key)
    if launches is None:
        return False
    launches.again(device, addresses)
    return True


def remember(key: Key, launches: Launches) -> None:
    """Launches that went well, for the next call with this key."""
    if _DIRECT:
        if len(_known) >= REMEMBERED:
            _known.clear()
        _known[key] = launches


def kind(recipe: Recipe, device: torch.device, *tensors: Tensor | None) -> Key:
    """What a key says of a codec and of tensors: dtypes, and whether they start at a multiple of 16 bytes."""
    told = tuple((t.dtype, t.data_ptr() % 16 == 0) if t is not None else None for t in tensors)
    return recipe.format, recipe.peak, id(recipe.table), device.index, told
