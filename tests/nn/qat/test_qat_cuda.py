"""Training with a grid on a GPU: it runs in mixed precision, and the converted model answers as on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import narrowcast as nc

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS = {
    "linear": (lambda: nn.Linear(40, 12), (7, 40)),
    "large linear": (lambda: nn.Linear(512, 300), (65, 512)),
    "conv1d": (lambda: nn.Conv1d(6, 8, 3, padding="same"), (2, 6, 11)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, 2, padding=1, dilation=2, groups=2, bias=False), (2, 4, 9, 10)),
}


def trained(model: nn.Module, x: torch.Tensor, weights: str, activations: str | None, half: bool) -> nn.Module:
    nc.prepare_qat_(model, weights, activations, first_last=None)
    optimizer = torch.optim.SGD(nc.parameter_groups(model, alpha_lr=1e-3), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = model(x).float().square().mean()
        loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("pair", [("apot6", "apot5"), ("apot4", "apot4"), ("int8", "int8")])
@pytest.mark.parametrize("kind", LAYERS)
def test_integer_layers_on_a_gpu_give_the_bits_that_the_cpu_gives(kind: str, pair: tuple[str, str], half: bool) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    x = torch.randn(shape)
    there = trained(make().cuda(), x.cuda(), *pair, half)
    nc.convert_(there)  # once: mean and std of a weight are not the same bits on both
    here = copy.deepcopy(there).cpu()
    assert type(there).__name__.startswith("Integer")
    assert torch.equal(there(x.cuda()).cpu(), here(x))


@pytest.mark.parametrize("spec", ["apot4", "int4", "nf4", "int8"])
def test_the_packed_weight_is_the_trained_one_bit_for_bit_on_a_gpu(spec: str) -> None:
    torch.manual_seed(0)
    linear = trained(nn.Linear(256, 64).cuda(), torch.randn(9, 256, device="cuda"), spec, None, False)
    weight = linear.quantized_weight().detach()
    nc.convert_(linear)
    assert torch.equal(linear.decoded(), weight)
