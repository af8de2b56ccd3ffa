"""Decoders that a generation refuses before it writes anything: each would fail later, or write another text."""

from __future__ import annotations

import torch
from torch import nn

from narrowcast.errors import DtypeError, ModelKindError
from narrowcast.generate.decoder import MLP, Attention, Body, Decoder, Layer
from narrowcast.generate.kernels import is_changed, is_untouched
from narrowcast.nn.modules.embedding import Embedding

OF_PROMPTS = ("mix", "turned", "attend")
"""Methods of `Layer` and `Attention` that read a prompt, and no single token."""


def _called(decoder: Decoder) -> dict[str, nn.Module]:
    """Modules that the decoder itself calls, as torch made them.

    What is within other modules, or has hooks or a forward of its own, may cast what comes in, or load its weights.
    """
    called = {decoder.model.embed_tokens, decoder.model.norm, decoder.lm_head}
    for parent in decoder.modules():
        if type(parent) in (Layer, Attention, MLP):
            called.update(parent.children())
    return {name: module for name, module in decoder.named_modules() if module in called and is_untouched(module)}


def check_numbers(decoder: Decoder) -> None:
    """Refuse weights without numbers: products of torch take some, and what comes out is whatever was there."""
    modules = _called(decoder) | {"model.norm": decoder.model.norm}  # whose device is taken for that of the decoder
    empty = [
        f"{name}.{own}"
        for name, module in modules.items()
        for own, weight in module.named_parameters(recurse=False)
        if weight.is_meta
    ]
    if empty:
        raise ModelKindError(
            f"decoder: {len(empty)} of its weights, such as {empty[0]}, are on the meta device, without numbers. Load "
            "them: nc.load(path, decoder), or load_decoder(path), which makes a decoder and loads it."
        )


def check_calls(decoder: Decoder) -> None:
    """Refuse what would not run, or for prompts alone: hooks of modules whose methods are called, not they themselves,
    and methods of a subclass in whose place `Layer.advance` does the same for one token.

    Accelerate gives every module a forward (and `_hf_hook`); what it does for those inside is enough.
    """
    for name, module in decoder.named_modules():
        never_called = isinstance(module, Decoder | Body | Layer | Attention) and not hasattr(module, "_hf_hook")
        if never_called and is_changed(module):
            raise ModelKindError(
                f"decoder: {name or 'it'}, a {type(module).__name__}, has hooks or a forward of its own, which would "
                "not run: a generation calls what is inside. Put them on its linear layers, norms or mlp."
            )
        if not isinstance(module, Layer) or type(module).advance is not Layer.advance:
            continue
        for part, own in ((module, Layer), (module.self_attn, Attention)):
            changed = [each for each in OF_PROMPTS if getattr(type(part), each, None) is not getattr(own, each, None)]
            if changed:
                raise ModelKindError(
                    f"decoder: {type(part).__name__}.{changed[0]} of {name} would run for prompts alone. A subclass of "
                    "Layer that changes what a layer does needs an advance(), which reads one token, too."
                )


def check_dtypes(decoder: Decoder, device: torch.device) -> None:
    """Refuse floats of several dtypes, which files may hold, where activations and the cache have but one."""
    if torch.is_autocast_enabled(device.type):
        return
    kinds = {decoder.model.norm.weight.dtype: "model.norm"}
    for name, module in _called(decoder).items():
        if type(module) is Embedding:
            kinds.setdefault(module.dtype, name)
        elif type(module) is nn.Embedding or type(module) is nn.Linear:
            kinds.setdefault(module.weight.dtype, name)
    if len(kinds) > 1:
        dtypes = " and ".join(f"{str(dtype).removeprefix('torch.')} ({name})" for dtype, name in kinds.items())
        raise DtypeError(
            f"decoder: its floats are {dtypes}, and activations have one dtype. Choose it: load_decoder(folder, "
            "dtype=torch.bfloat16), decoder.to(torch.bfloat16), or narrowcast generate --dtype bfloat16."
        )
