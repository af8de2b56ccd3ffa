"""A folder of transformers, quantized or not, to a `Decoder`; or random weights of a given shape."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from narrowcast.checkpoint.models import load
from narrowcast.errors import DtypeError
from narrowcast.generate.decoder import Decoder
from narrowcast.generate.shape import Shape, read_shape

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_decoder(
    folder: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Decoder:
    """The model in a folder that transformers or `narrowcast quantize` wrote. Encoded weights stay encoded.

    `dtype`: of floats and activations; by default as the file has them.
    """
    shape = read_shape(Path(folder))
    with torch.device("meta"):
        decoder = Decoder(shape)
    load(folder, decoder, device=device)
    if dtype is not None:
        decoder.to(_checked(dtype))
    return _for_inference(decoder)


def random_decoder(
    shape: Shape, *, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu", seed: int = 0
) -> Decoder:
    """Random weights of a usual size: their speed is real, their text is not."""
    with torch.device("meta"):
        decoder = Decoder(shape).to(_checked(dtype))
    decoder.to_empty(device=device)
    if shape.tied:
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
        for module in decoder.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
    return _for_inference(decoder)


def _checked(dtype: torch.dtype) -> torch.dtype:
    if dtype not in FLOATS:
        raise DtypeError(
            f"dtype={dtype}: must be one of {', '.join(str(one).removeprefix('torch.') for one in FLOATS)}."
        )
    return dtype


def _for_inference(decoder: Decoder) -> Decoder:
    return decoder.eval().requires_grad_(False)
