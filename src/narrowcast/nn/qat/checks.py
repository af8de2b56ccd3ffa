"""What fake quantization refuses: options, shapes, and starts where there can be none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.errors import CalibrationError, ShapeError, SpecError
from narrowcast.kernels import operators
from narrowcast.nn.qat.clips import STARTS

if TYPE_CHECKING:
    from narrowcast.nn.qat.fake_quantize import FakeQuantize


def check_start(start: object) -> str:
    if start not in STARTS:
        raise SpecError(f"start={start!r}: a clip starts from {', '.join(map(repr, STARTS))} of the data.")
    return str(start)


def check_normalize(normalize: object) -> None:
    if normalize not in (None, "through", "detached"):
        raise SpecError(f'normalize={normalize!r}: expected None, "through" or "detached".')


def check_axis(x: Tensor, axis: int, channels: int) -> None:
    """Refuse an x that has no such dimension, or not as many channels as there are clips."""
    if not -x.dim() <= axis < x.dim():
        raise ShapeError(
            f"channel_axis={axis}: x has {x.dim()} dimensions, shape {list(x.shape)}, so that an axis is from "
            f"{-x.dim()} to {x.dim() - 1}. Pass channel_axis=None for one clip for all of x."
        )
    if channels and x.shape[axis] != channels:
        raise ShapeError(
            f"x: has {x.shape[axis]} slices along channel_axis={axis}, and this quantizer {channels} clips: it was "
            "made for, or started from, another tensor. Use one FakeQuantize per tensor."
        )


def refuse_start(quantizer: FakeQuantize) -> None:
    """Refuse to start from a batch where the start would be lost, compiled in, or different on every rank."""
    why = ""
    if torch.compiler.is_compiling():
        why = "the model is being compiled, and a start cannot be"
    elif operators.transformed():
        why = "a transform of torch.func or forward-mode differentiation is at work, and a start cannot be inside"
    elif not quantizer.training:
        why = "the model is in eval mode, where nothing is learned"
    elif dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        why = "every rank would start from data of its own"
    if why:
        raise CalibrationError(
            f"this FakeQuantize({quantizer.codec.spec!r}) has no clip yet, and {why}. Call "
            "narrowcast.calibrate_(model, loader), or run one training batch, before (on the plain model, before "
            "compile, DDP or fully_shard)."
        )
