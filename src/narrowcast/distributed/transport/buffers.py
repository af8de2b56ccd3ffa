"""Memory that a lane uses again for each of its collectives.

New memory costs a page fault every 4 KB, several times the cost of encoding into it. A lane runs one collective at a
time, so each buffer can serve all of them. When buffers hold more than `KEEP` bytes in all, they are given back after
the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

KEEP = 256 << 20


class Buffers:
    """Named buffers of bytes that grow as needed."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.device], Tensor] = {}
        self.version = 0
        """Changes when `take` gives other memory than before: views of the old one are to be made anew."""

    def take(self, name: str, nbytes: int, device: torch.device, *, pinned: bool = False) -> Tensor:
        """`nbytes` of uninitialised memory. The same name shares its memory."""
        key = name, device
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < nbytes:
            self._buffers.pop(key, None)
            self.version += 1
            with torch.inference_mode(False):  # it outlives the call
                buffer = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
            self._buffers[key] = buffer
        return buffer[:nbytes]

    def trim(self) -> bool:
        """Give all buffers back if they are large together; returns whether they were."""
        large = sum(buffer.numel() for buffer in self._buffers.values()) > KEEP
        if large:
            self.clear()
        return large

    def clear(self) -> None:
        self._buffers.clear()
        self.version += 1
