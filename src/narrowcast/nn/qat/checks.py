"""What fake quantization refuses or warns of: options, shapes, clips, and starts where there can be none."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from narrowcast.errors import CalibrationError, ClipWarning, ShapeError, SpecError
from narrowcast.kernels import operators
from narrowcast.nn.qat.clips import STARTS
from narrowcast.nn.qat.straight_through import FLOOR

if TYPE_CHECKING:
    from narrowcast.nn.qat.fake_quantize import FakeQuantize

LOOK_EVERY = 128
"""On a GPU, how many training batches pass between two looks for a bad clip: each look waits for the device."""


def check_start(start: object) -> str:
    if start not in STARTS:
        raise SpecError(f"start={start!r}: a clip starts from {', '.join(map(repr, STARTS))} of the data.")
    return str(start)


def check_normalize(normalize: object) -> None:
    if normalize not in (None, "through", "detached", "paper"):
        raise SpecError(f'normalize={normalize!r}: expected None, "through", "detached" or "paper".')


def check_sign(quantizer: FakeQuantize, signed: bool | None) -> None:
    """Refuse a sign that the quantizer was not made with."""
    spec, decided = quantizer.codec.spec, quantizer.signed
    if signed is not None and decided is not None and signed != decided:
        raise SpecError(f"signed={signed}: this FakeQuantize({spec!r}) was made with signed={decided}.")


def check_clip(quantizer: FakeQuantize, clip: Tensor | float) -> Tensor:
    """A clip as alpha holds it, or why it cannot be one."""
    device, wanted = quantizer.alpha.device, quantizer.alpha.shape
    try:
        value = torch.as_tensor(clip, dtype=torch.float32, device=device).detach().reshape(-1)
    except (TypeError, ValueError) as error:
        raise SpecError(f"clip={clip!r}: expected a number, or a tensor with one for each channel.") from error
    fits = value.numel() > 0 if quantizer.channel_axis is not None and not wanted[0] else value.shape == wanted
    if not fits:
        raise ShapeError(
            f"clip: it has {value.numel()} number(s), and this FakeQuantize({quantizer.codec.spec!r}) {wanted[0]} "
            f"clip(s), with channel_axis={quantizer.channel_axis}. Pass one for each."
        )
    if device.type != "meta" and not bool(((value > 0) & (value < math.inf)).all()):
        raise SpecError(f"clip={clip}: the magnitude at which a grid saturates is positive and finite.")
    return value


def report_floored(quantizer: FakeQuantize, good: Tensor) -> None:
    """Count clips that are not `good`, and say it once."""
    quantizer.floored += (~good).sum()
    if torch.compiler.is_compiling() or quantizer._warned:
        return
    quantizer._batches += 1
    if good.device.type == "cuda" and quantizer._batches % LOOK_EVERY != 1:
        return
    if good.device.type != "meta" and int(quantizer.floored):
        quantizer._warned = True
        warnings.warn(
            f"alpha of a FakeQuantize({quantizer.codec.spec!r}) is zero, negative or not finite in "
            f"{int(quantizer.floored)} place(s): training goes on with a clip of {FLOOR:.3g} there, and `floored` "
            "counts. Usually alpha's learning rate is too high: narrowcast.parameter_groups(model, alpha_lr=...) "
            "gives it one of its own.",
            ClipWarning,
            stacklevel=6,
        )


def check_axis(x: Tensor, axis: int | None, channels: int) -> None:
    """Refuse an x that has no such dimension, or not as many channels as there are clips."""
    if axis is None:
        return
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
    """Refuse to choose a clip from a batch where that would be lost, compiled in, or different on every rank."""
    why = ""
    if torch.compiler.is_compiling():
        why = "the model is being compiled, and a start cannot be"
    elif operators.transformed():
        why = "a transform of torch.func or forward-mode differentiation is at work, and a start cannot be inside"
    elif not quantizer.training:
        why = "the model is in eval mode, where nothing is learned"
    elif dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        why = "every rank would start from data of its own"
    if why and quantizer.is_started:
        raise CalibrationError(
            f"the clip of this FakeQuantize({quantizer.codec.spec!r}) is not learned: its observer would start it anew "
            f"from this batch, and {why}. To keep the clip that it has, set quantizer.observer = None."
        )
    if why:
        raise CalibrationError(
            f"this FakeQuantize({quantizer.codec.spec!r}) has no clip yet, and {why}. Call "
            "narrowcast.calibrate_(model, loader), or run one training batch, before (on the plain model, before "
            "compile, DDP or fully_shard)."
        )
