"""Do rotations pay? The language model of bench/language_model.py, rotated offline, beside itself.

    PYTHONPATH=src:bench python bench/rotations.py --folder /tmp/lm [--packed FILES] [--roundings nearest,search,gptq]

As in QuaRot and SpinQuant, as far as it costs nothing when the model runs: the residual stream is multiplied with one
random orthogonal matrix, and the values of each head with another, both fused into the weights on either side. For that
the weights of norms are fused into the layers behind them, and layers that write to the stream are centred, so that
norms need no mean. The float model stays what it is, up to rounding (its perplexity is printed). Rotations that run
with the model, such as one of the hidden units of the feed-forward, are not tried.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import narrowcast as nc
from language_model import LAYERS, SIZES, perplexity, unpacked
from narrowcast.byte_gpt import ByteGPT, batches, stdlib_text


def orthogonal(size: int, seed: int) -> Tensor:
    draws = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(draws)[0]


@torch.no_grad()
def rotated(model: ByteGPT) -> ByteGPT:
    """A copy that computes the same from rotated weights."""
    device, dtype = model.following.weight.device, model.following.weight.dtype
    model = copy.deepcopy(model).cpu().double()
    width, heads = model.config.width, model.config.heads
    turn = orthogonal(width, 0)

    def read(norm: nn.LayerNorm, layer: nn.Linear) -> None:
        if layer.bias is not None:
            layer.bias += layer.weight @ norm.bias
        else:
            layer.bias = nn.Parameter(layer.weight @ norm.bias)
        layer.weight.copy_(layer.weight * norm.weight @ turn)

    def written(rows: Tensor) -> Tensor:
        """Rows [..., width] that are added to the stream: centred and turned."""
        return (rows - rows.mean(-1, keepdim=True)) @ turn

    for table in (model.symbols, model.positions):
        table.weight.copy_(written(table.weight))
    for number, block in enumerate(model.blocks):
        _turn_values(block, orthogonal(width // heads, 1 + number), heads)
        read(block.before_attention, block.queries_keys_values)
        read(block.before_layers, block.up)
        for layer in (block.attended, block.down):
            layer.weight.copy_(written(layer.weight.t()).t())
            layer.bias.copy_(written(layer.bias))
        block.before_attention, block.before_layers = _norm(block.before_attention), _norm(block.before_layers)
    read(model.norm, model.following)
    model.norm = _norm(model.norm)  # type: ignore[assignment]
    return model.to(device, dtype)


def _turn_values(block: Any, turn: Tensor, heads: int) -> None:
    """Turn the values of each head, and turn them back in the output of attention."""
    width = block.attended.weight.shape[0]
    values, bias = block.queries_keys_values.weight[2 * width :], block.queries_keys_values.bias[2 * width :]
    values.copy_((turn.t() @ values.view(heads, width // heads, width)).reshape(width, width))
    bias.copy_((bias.view(heads, -1) @ turn).reshape(-1))
    block.attended.weight.copy_((block.attended.weight.view(width, heads, -1) @ turn).reshape(width, width))


def _norm(norm: nn.LayerNorm) -> nn.RMSNorm:
    return nn.RMSNorm(norm.normalized_shape, norm.eps, elementwise_affine=False)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--packed", type=Path, nargs="*", default=[])
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--codecs", default="int4:block=64,int3:block=64")
    parser.add_argument("--roundings", default="nearest,search,gptq")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--windows", type=int, default=512)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = SIZES[arguments.size]
    state = unpacked(arguments.packed) if arguments.packed else torch.load(arguments.folder / "checkpoint.pt")["model"]
    plain = ByteGPT(config).to(device).eval()
    plain.load_state_dict(state)
    models = {"plain": plain, "rotated": rotated(plain)}
    held_out, samples = stdlib_text(held_out=True), batches(stdlib_text(), config.context, 8, seed=2)
    data = [next(samples)[0].to(device) for _ in range(arguments.samples // 8)]
    print("| codec | rounding | model | perplexity | above float |\n|---|---|---|---:|---:|")
    exact = {}
    for name, model in models.items():
        models[name] = model.bfloat16() if device.type == "cuda" else model
        exact[name] = perplexity(models[name], held_out, config.context, device, arguments.windows)
        print(f"| float | | {name} | {exact[name]:.4f} | |", flush=True)
    for codec in arguments.codecs.split(","):
        for rounding in arguments.roundings.split(","):
            for name, model in models.items():
                rounded = copy.deepcopy(model)
                given = data if rounding == "gptq" else None
                nc.quantize_(rounded, codec, rounding=rounding, data=given, rules=LAYERS)
                found = perplexity(rounded, held_out, config.context, device, arguments.windows)
                print(f"| {codec} | {rounding} | {name} | {found:.4f} | {found / exact[name] - 1:+.2%} |", flush=True)


if __name__ == "__main__":
    main()
