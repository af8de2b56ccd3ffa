"""What a decoder does between its products, for one new position of each sequence.

`Kernels` is the contract, `Torch` what it means, in plain torch, on any device and in any dtype. `Compiled` has it in
the compiled core, for fp32 and bf16 on a CPU (kernels/cpu/between.py). `Fused` has it in four or five launches a layer,
of kernels in Triton (kernels/triton/norms.py, attention.py) and, for attention over short caches, in CUDA
(kernels/cuda/attention.py). `kernels_for` chooses, and says why it chose `Torch` on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as global_hooks

from narrowcast.generate.cache import keep, seen
from narrowcast.generate.rotary import turn
from narrowcast.kernels.cpu.between import FLOATS, Between, between
from narrowcast.kernels.cpu.binding import Native
from narrowcast.kernels.operators.dispatch import kernel_for


class Place(NamedTuple):
    """Where the sequences of a batch are: what every layer of a step shares."""

    at: Tensor
    """[batch]: the position of the token that is read."""
    turns: Tensor
    """Cosines and sines of all positions: rotary.turns."""
    longest: int
    """All positions are below it."""
    by: Tensor | None = None
    """The rows of `turns` that these positions have: [batch, 1, 2, size / 2]."""
    mask: Tensor | None = None
    """Which positions each sequence attends to: cache.seen."""


class Kernels(Protocol):
    """The parts of a step that are no products. Activations are [batch, width]."""

    name: str

    def place(self, at: Tensor, turns: Tensor, longest: int) -> Place:
        """What every layer shares, computed once."""

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
        """x + delta, and its norm."""

    def attend(self, parts: tuple[Tensor, Tensor, Tensor], cache: tuple[Tensor, Tensor], place: Place) -> Tensor:
        """Turn queries and keys, keep keys and values, attend.

        `parts`: queries, keys and values, [batch, heads * size]; `cache`: those of the layer, [batch, key_heads,
        positions, size].
        """

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""


class Torch:
    """Plain torch, rounding to the dtype of the activations after every operation."""

    def __init__(self, reason: str = "") -> None:
        self.name = f"torch ({reason})" if reason else "torch"

    def place(self, at: Tensor, turns: Tensor, longest: int) -> Place:
        return Place(at, turns, longest, turns[at][:, None], seen(at, longest))

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
        total = x if delta is None else x + delta
        return total, norm(total)

    def attend(self, parts: tuple[Tensor, Tensor, Tensor], cache: tuple[Tensor, Tensor], place: Place) -> Tensor:
        size, key_heads = cache[0].shape[3], cache[0].shape[1]
        queries, keys, values = (part.view(len(part), -1, 1, size) for part in parts)
        by = place.by
        assert by is not None
        keep(cache, place.at, turn(keys, by), values)
        known, weighed = (held[:, :, : place.longest] for held in cache)
        grouped = True if queries.shape[1] != key_heads else False  # noqa: SIM210 (under torch.compile, a plain bool)
        mixed = F.scaled_dot_product_attention(
            turn(queries, by), known, weighed, attn_mask=place.mask, enable_gqa=grouped
        )
        return mixed.flatten(1)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class Compiled(Torch):
    """One call of the compiled core each, in fp32 inside; what that does not take is left to torch."""

    def __init__(self, core: Between, dtype: torch.dtype) -> None:
        self.name = "native"
        self._core, self._dtype = core, dtype

    def place(self, at: Tensor, turns: Tensor, longest: int) -> Place:
        return Place(at, turns, longest)

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
        given = (x,) if delta is None else (x, delta)
        if not (is_plain_norm(norm) and self._takes(norm.weight[None], *given)):
            return super().add_norm(x, delta, norm)
        assert norm.eps is not None
        return self._core.add_norm(x, delta, norm.weight, norm.eps)

    def attend(self, parts: tuple[Tensor, Tensor, Tensor], cache: tuple[Tensor, Tensor], place: Place) -> Tensor:
        if not self._takes(*parts, *cache) or cache[0].stride() != cache[1].stride():
            return super().attend(parts, cache, super().place(place.at, place.turns, place.longest))
        return self._core.attend(*parts, place.turns, place.at, *cache)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._core.gate(gate, up) if self._takes(gate, up) else super().gate(gate, up)

    def _takes(self, *tensors: Tensor) -> bool:
        return all(tensor.dtype == self._dtype and tensor.stride(-1) == 1 for tensor in tensors)


class Fused(Torch):
    """One launch for a norm and the sum before it, one for a gate, one (long caches, few heads: two) for attention."""

    def __init__(self, device: torch.device) -> None:
        from narrowcast.kernels.cuda import attention as short_attention
        from narrowcast.kernels.cuda import choose
        from narrowcast.kernels.triton import attention, norms

        self.name = "triton"
        self._attention, self._norms = attention, norms
        self._short = None if choose.obstacle(device) else short_attention

    def place(self, at: Tensor, turns: Tensor, longest: int) -> Place:
        return Place(at, turns, longest)

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: nn.RMSNorm) -> tuple[Tensor, Tensor]:
        if not is_plain_norm(norm):
            return super().add_norm(x, delta, norm)
        assert norm.eps is not None
        return self._norms.add_norm(x, delta, norm.weight, norm.eps)

    def attend(self, parts: tuple[Tensor, Tensor, Tensor], cache: tuple[Tensor, Tensor], place: Place) -> Tensor:
        given = (*parts, place.turns, place.at, *cache)
        mixed = None if self._short is None else self._short.attend(*given)
        return self._attention.attend(*given) if mixed is None else mixed

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self._norms.gate(gate, up)


def is_untouched(module: nn.Module) -> bool:
    """Whether a call of a module is its class's forward alone: no hooks, no forward of its own, as Accelerate sets."""
    everywhere = global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks
    return not (everywhere or is_changed(module))


def is_changed(module: nn.Module) -> bool:
    """Whether a module itself, not all modules, was given hooks or a forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def is_plain_norm(norm: nn.Module) -> bool:
    """Whether a kernel may stand for a norm, which others may have replaced."""
    return type(norm) is nn.RMSNorm and norm.weight is not None and norm.eps is not None and is_untouched(norm)


def kernels_for(decoder: nn.Module, device: torch.device) -> Kernels:
    """`Fused` on CUDA, `Compiled` on a CPU, where their kernels take the decoder; else `Torch`."""
    norms = [module.weight for module in decoder.modules() if isinstance(module, nn.RMSNorm)]
    kinds = {weight.dtype for weight in norms if weight is not None}
    if device.type != "cuda":
        core = kernel_for("cpu") if device.type == "cpu" else None
        known = len(kinds) == 1 and kinds <= set(FLOATS)
        return Compiled(between(core), *kinds) if known and isinstance(core, Native) else Torch()
    if torch.is_autocast_enabled(device.type):
        return Torch("under autocast, products and the cache have different dtypes")
    if len(kinds) > 1 or not kinds <= {torch.float32, torch.float16, torch.bfloat16}:
        return Torch(f"norms are {', '.join(sorted(map(str, kinds)))}, not all of one kind that Triton is used for")
    try:
        return Fused(device)
    except ImportError as error:
        return Torch(f"Triton cannot be imported: {error}")
