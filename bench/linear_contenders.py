"""The contenders of bench/linear.py: F.linear in floats, int8 and int4 of torch and torchao, and narrowcast's codecs.

Each holds as many copies of its weights as it takes to fill `ROTATED` bytes, so that no call finds them in a cache.
`contenders(weight)` yields those that run here, and two that only read memory: the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowcast as nc

OURS = ("int8:block=row", "int8", "int4:block=128", "int4", "nf4", "apot4", "fp8_e4m3")
ROTATED = 120 << 20
Call = Callable[[Tensor, int], object]


class Contender:
    """A way to multiply: `call(x, i)` uses copy i of the weights. One copy has `nbytes`."""

    def __init__(self, name: str, call: Call, copies: int, nbytes: int, dtype: torch.dtype | None = None) -> None:
        self.name, self.call, self.copies, self.nbytes, self.dtype = name, call, copies, nbytes, dtype


def copied(weight: Tensor) -> list[Tensor]:
    return [weight.clone() for _ in range(max(2, -(-ROTATED // weight.nbytes)))]


def floats(weight: Tensor, dtype: torch.dtype) -> Contender:
    weights = copied(weight.to(dtype))
    name = f"F.linear {str(dtype).removeprefix('torch.')}"
    return Contender(name, lambda x, i: F.linear(x, weights[i]), len(weights), weights[0].nbytes, dtype)


def integers(weight: Tensor) -> tuple[list[Tensor], Tensor]:
    scale = weight.abs().amax(1) / 127
    return copied((weight / scale[:, None]).round().to(torch.int8)), scale


def seed_int8(weight: Tensor) -> Contender:
    """gpt-fast's formula, eager."""
    weights, scale = integers(weight)
    scale = scale.bfloat16()

    def call(x: Tensor, i: int) -> Tensor:
        return F.linear(x, weights[i].to(x.dtype)) * scale

    return Contender("seed int8, eager", call, len(weights), weights[0].nbytes, torch.bfloat16)


def int8pack(weight: Tensor) -> Contender:
    weights, scale = integers(weight)
    scale = scale.bfloat16()

    def call(x: Tensor, i: int) -> Tensor:
        return torch.ops.aten._weight_int8pack_mm(x, weights[i], scale)

    return Contender("aten int8pack", call, len(weights), weights[0].nbytes, torch.bfloat16)


def int4pack(weight: Tensor, group: int = 128) -> Contender:
    """torch's own int4 for CPUs, which torchao's opaque layout calls; group scales and zero points in bf16."""
    groups = weight.unflatten(1, (-1, group))
    least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    scale = ((most - least) / 15).bfloat16().float()
    middle = (least + 8 * scale).bfloat16().float()  # what code 8 stands for
    codes = ((groups - middle) / scale + 8).round().clamp(0, 15).to(torch.int32).flatten(1)
    packed = copied(torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1))
    scales = torch.cat([scale, middle], 2).transpose(0, 1).bfloat16().contiguous()

    def call(x: Tensor, i: int) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed[i], group, scales)

    return Contender("aten int4pack", call, len(packed), packed[0].nbytes + scales.nbytes, torch.bfloat16)


def torchao_int8(weight: Tensor, compiled: bool) -> Contender:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    layers = []
    for _ in range(-(-ROTATED // weight.numel())):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.bfloat16)
        layer.weight.data.copy_(weight)
        quantize_(layer, Int8WeightOnlyConfig())
        layers.append(layer.weight)
    run = torch.compile(F.linear, dynamic=False) if compiled else F.linear
    name = f"torchao int8, {'compiled' if compiled else 'eager'}"
    return Contender(name, lambda x, i: run(x, layers[i]), len(layers), weight.numel(), torch.bfloat16)


def ours(weight: Tensor, spec: str) -> Contender:
    codec = nc.codec(spec)
    data = copied(codec.encode(weight, 1))
    return Contender(f"narrowcast {spec}", lambda x, i: codec.linear(x, data[i]), len(data), data[0].nbytes)


def readers(weight: Tensor) -> Iterator[Contender]:
    """Two ways to read memory and do next to nothing else; the faster one is the limit."""
    weights = copied(weight)
    yield Contender("read: sum of fp32", lambda x, i: weights[i].sum(), len(weights), weight.nbytes)
    ints = [one.view(torch.int32) for one in weights]
    yield Contender("read: largest int32", lambda x, i: ints[i].amax(), len(weights), weight.nbytes)


def contenders(weight: Tensor, compiled: bool) -> Iterator[Contender]:
    makers: list[Callable[[], Contender]] = [
        lambda: floats(weight, torch.float32),
        lambda: floats(weight, torch.bfloat16),
        lambda: seed_int8(weight),
        lambda: int8pack(weight),
        lambda: int4pack(weight),
        lambda: torchao_int8(weight, False),
    ]
    if compiled:
        makers.append(lambda: torchao_int8(weight, True))
    yield from readers(weight)
    for make in makers:
        try:
            competitor = make()
            competitor.call(torch.randn(1, weight.shape[1]).to(competitor.dtype), 0)
        except Exception as error:
            print(f"a competitor did not run: {type(error).__name__}: {str(error).strip().splitlines()[0][:100]}")
        else:
            yield competitor
    for spec in OURS:
        yield ours(weight, spec)
