"""Which weights are rounded together: stacks of blocks, the order inside a block, and models without a stack."""

from __future__ import annotations

import copy

import torch
from test_gptq_rounding import Model, batches
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.nn.rounding.sequence import find_stacks
from narrowcast.nn.survey import survey


def test_stacks_are_the_outermost_lists_of_modules_of_one_class() -> None:
    model = Model()
    assert find_stacks(model, survey(model).weights) == [list(model.layers)]
    plain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    assert find_stacks(plain, survey(plain).weights) == []
    linears = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    assert find_stacks(linears, survey(linears).weights) == []  # single layers are no blocks


class Skipping(nn.Module):
    """Blocks that are not simply chained: each gets the sum of all before it, by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(input=x)
        return x


def test_blocks_that_are_not_chained_are_rounded_on_the_whole_model() -> None:
    torch.manual_seed(0)
    model, x = Skipping().eval(), torch.randn(64, 16)
    exact = model(x).detach()
    nearest = copy.deepcopy(model)
    nc.quantize_(nearest, "int3:block=16")
    report = nc.quantize_(model, "int3:block=16", rounding="gptq", data=[x[:32], x[32:]])
    assert [entry.rounding for entry in report.entries] == ["gptq"] * 3
    errors = [float((some(x) - exact).detach().square().sum()) for some in (model, nearest)]
    assert errors[0] < errors[1]


def test_a_later_block_makes_up_for_what_earlier_ones_lost() -> None:
    """With the first block in 2 bits, the others are fitted to the outputs that the unrounded model has."""
    torch.manual_seed(0)
    model, data = Model().eval(), batches(8)
    exact = [model(tokens).detach() for tokens in data]
    rules = {r"layers\.0": "int2:block=16", r"embedding": None}

    def error(rounded: nn.Module) -> float:
        pairs = zip(data, exact, strict=True)
        return sum(float((rounded(tokens) - wanted).detach().square().sum()) for tokens, wanted in pairs)

    rounded, floats = copy.deepcopy(model), copy.deepcopy(model)
    nc.quantize_(rounded, "int8:block=16", rules=rules, rounding="gptq", data=data)
    nc.quantize_(floats, None, rules=rules, rounding="gptq", data=data)  # the other blocks stay as they are
    assert error(rounded) < error(floats)


def test_conv1d_of_transformers_is_rounded_on_its_inputs() -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    layer, x = Conv1D(12, 32), torch.randn(200, 8) @ torch.randn(8, 32)
    exact, nearest = layer(x).detach(), copy.deepcopy(layer)
    nearest = nn.Sequential(nearest)
    model = nn.Sequential(layer)
    nc.quantize_(nearest, "int3:block=16")
    (entry,) = nc.quantize_(model, "int3:block=16", rounding="gptq", data=[x]).entries
    assert entry.rounding == "gptq"
    errors = [float((some(x) - exact).detach().square().sum()) for some in (model, nearest)]
    assert errors[0] < 0.7 * errors[1]


def test_a_weight_that_blocks_share_is_rounded_once() -> None:
    torch.manual_seed(0)
    model = Model().eval()
    model.layers[2].up.weight = model.layers[0].up.weight
    report = nc.quantize_(model, "int4:block=16", rounding="gptq", data=batches())
    (shared,) = [entry for entry in report.entries if entry.name == "layers.0.up.weight"]
    assert (shared.rounding, shared.tied) == ("gptq", ("layers.2.up.weight",))
    assert shared.error < shared.nearest_error
    assert model.layers[2].up.weight is model.layers[0].up.weight
