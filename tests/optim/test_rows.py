"""Moments held in rows: what they are, what they cost, and that they come back to the bit."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from small_training import backward, bits, train
from torch import Tensor, nn

import narrowcast as nc
from ambient import SURROUNDINGS, surrounded
from narrowcast.errors import NarrowcastError, SpecError, StateDictError
from narrowcast.kernels import moments, reference

STATES = ("int8", "int4", "nf4", "fp8_e4m3", "bf16", "int8:stochastic=true")
COUNT = "exp_avg_sq_steps"


def wide(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two matrices that are large enough for rows, and two vectors that are not."""
    generator = torch.Generator().manual_seed(0)
    layers = nn.Sequential(nn.Linear(24, 300), nn.GELU(), nn.Linear(300, 90), nn.GELU(), nn.Linear(90, 70)).to(dtype)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float32))
    return layers


def pair(**options: Any) -> tuple[nn.Sequential, nc.optim.AdamW]:
    layers = wide(options.pop("dtype", torch.float32))
    return layers, nc.optim.AdamW(layers.parameters(), **{"lr": 1e-2, "state": "int8", **options})


def second_of(optimizer: Any, parameter: Tensor, spec: str = "int8") -> Tensor:
    recipe = moments.second_recipe(nc.codec(spec).format, torch.device("cpu"))
    rows = optimizer.state[parameter]["exp_avg_sq_rows"]
    return reference.decode(rows, parameter[0].numel(), torch.float32, recipe)


# -- what is held --------------------------------------------------------------------------------------------------


def test_large_matrices_are_held_in_rows_and_the_rest_in_floats_with_a_reason() -> None:
    layers, optimizer = pair()
    train(layers, optimizer, range(1))
    held, short = optimizer.state[layers[2].weight], optimizer.state[layers[0].weight]
    assert held["exp_avg_rows"].dtype == held["exp_avg_sq_rows"].dtype == torch.uint8
    assert set(held) == {"step", "exp_avg_rows", "exp_avg_sq_rows"}
    assert held["exp_avg_rows"].shape == (90, nc.codec("int8").row_bytes(300))
    assert set(short) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.why_in_floats(layers[2].weight) is None
    assert "fewer than 64" in optimizer.why_in_floats(layers[0].weight)
    assert "two dimensions" in optimizer.why_in_floats(layers[2].bias)


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (torch.zeros(100, 100, dtype=torch.float64), "float64"),
        (torch.zeros(100, 100, dtype=torch.complex64), "complex64"),
        (torch.zeros((), dtype=torch.float32), "two dimensions"),
        (torch.zeros(0, 100, dtype=torch.float32), "4096 elements"),
        (torch.zeros(100_000, dtype=torch.float32), "two dimensions"),
        (torch.zeros(40, 100, dtype=torch.float32), "4096 elements"),
        (torch.zeros(500, 7, 9, dtype=torch.float32), "64 elements"),
    ],
)
def test_what_is_not_held_in_rows_steps_as_in_torch(parameter: Tensor, words: str) -> None:
    ours, theirs = parameter.clone().requires_grad_(), parameter.clone().requires_grad_()
    mine, reference_ = nc.optim.AdamW([ours], state="int8"), torch.optim.AdamW([theirs])
    assert words in mine.why_in_floats(ours)
    for optimizer, each in ((mine, ours), (reference_, theirs)):
        each.grad = torch.ones_like(each)
        optimizer.step()
    assert torch.equal(ours, theirs)
    assert set(mine.state[ours]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(("state", "most"), [("int8", 2.1), ("int4", 1.6), ("nf4", 1.6), ("bf16", 3.03)])
def test_bytes_a_parameter(state: str, most: float) -> None:
    weight = torch.zeros(512, 768, dtype=torch.float32).requires_grad_()
    optimizer = nc.optim.AdamW([weight], state=state)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    held = optimizer.state[weight]
    assert sum(each.nbytes for each in held.values()) / weight.numel() < most


def test_a_group_may_have_its_own_state() -> None:
    layers = wide()
    one, other = layers[2].weight, layers[4].weight
    optimizer = nc.optim.AdamW([{"params": [one], "state": None}, {"params": [other], "state": "int4"}], state="int8")
    optimizer.add_param_group({"params": [layers[2].bias]})
    train(layers, optimizer, range(2))
    assert "exp_avg" in optimizer.state[one]
    assert optimizer.state[other]["exp_avg_rows"].shape == (70, nc.codec("int4").row_bytes(90))
    assert [group.get("state") for group in optimizer.param_groups] == [None, "int4", "int8"]


# -- the second moment ---------------------------------------------------------------------------------------------


def test_a_positive_second_moment_never_becomes_zero_and_zero_stays_zero() -> None:
    """Over the whole range of fp32, beside a neighbour of any size, in one block."""
    sizes = torch.tensor([2.0**power for power in range(-149, 128)], dtype=torch.float64).float()
    v = torch.zeros(len(sizes), 128, dtype=torch.float32)
    v[:, 0], v[:, 1 : 1 + 3] = sizes, torch.tensor([1e-45, 1e-20, 1e20], dtype=torch.float32)
    format = moments.second_format(nc.codec("int8").format)
    for seed in range(8):
        rows = reference.encode_second(v, format, seed)
        again = reference.decode(rows, 128, torch.float32, moments.second_recipe(nc.codec("int8").format, v.device))
        assert (again[:, :4] > 0).all()
        assert (again[:, 4:] == 0).all()
        assert again.isfinite().all()


def test_the_bytes_of_a_second_moment() -> None:
    """Codes, a power of two for each block of 8, padding. Beside 1, what is below 2**-30.75 has code 1."""
    v = torch.tensor([[0.0, 1.0, 0.25, 2.0**-10, 1e-12, 3e-38, 0.5, 0.0, 1.0, 0.0]], dtype=torch.float32)
    rows = reference.encode_second(v, moments.second_format(nc.codec("int8:block=8").format), 0)
    assert rows.tolist() == [[0, 247, 231, 167, 1, 1, 239, 0, 247, 0, 128, 128, 0, 0, 0, 0]]


def test_levels_do_not_depend_on_the_block_so_what_does_not_change_keeps_its_value() -> None:
    format = moments.second_format(nc.codec("int8").format)
    recipe = moments.second_recipe(nc.codec("int8").format, torch.device("cpu"))
    v = torch.rand(1, 128, dtype=torch.float32) + 1e-3
    held = reference.decode(reference.encode_second(v, format, 0), 128, torch.float32, recipe)
    for seed, neighbour in enumerate((1e-6, 1.0, 1e3, 1e6)):
        held[0, 0] = neighbour
        again = reference.decode(reference.encode_second(held, format, seed), 128, torch.float32, recipe)
        assert torch.equal(again[0, 1:], held[0, 1:])


def test_random_rounding_has_the_right_mean() -> None:
    """The mean of n draws between neighbouring levels a gap apart has a deviation of at most gap / (2 sqrt(n))."""
    format = moments.second_format(nc.codec("int8").format)
    recipe = moments.second_recipe(nc.codec("int8").format, torch.device("cpu"))
    v = torch.linspace(0.5, 1.0, 128, dtype=torch.float32).view(1, -1)
    seeds = 2000
    total = sum(
        reference.decode(reference.encode_second(v, format, seed), 128, torch.float64, recipe) for seed in range(seeds)
    )
    gap = 0.5 / 8
    assert ((total / seeds - v).abs() < 5 * gap / (2 * seeds**0.5)).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_shows_in_its_block_alone(bad: float) -> None:
    layers, optimizer = pair()
    train(layers, optimizer, range(1))
    weight = layers[2].weight
    weight.grad[3, 7] = bad
    optimizer.step()
    assert not weight[3, 7].isfinite()
    optimizer.zero_grad()
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert weight[3, :128].isnan().all()  # the block of 128
    assert weight[3, 128:].isfinite().all()
    assert weight[4].isfinite().all()


# -- steps ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"fused": True}, {"foreach": True}], ids=str)
def test_the_first_step_is_torchs_but_for_rounding(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Before the first step nothing was rounded. The update is lr times a number of size 1: its fp32 arithmetic is off
    by a few units of 2**-24 of lr and of the parameter, and the result is rounded to the dtype once by each."""
    layers, optimizer = pair(dtype=dtype, **options)
    other = copy.deepcopy(layers).float()
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2, maximize=options.get("maximize", False))
    backward(layers, 0)
    for mine, each in zip(layers.parameters(), other.parameters(), strict=True):
        each.grad = mine.grad.float()
    optimizer.step()
    theirs.step()
    ours, exact = layers[2].weight.float(), other[2].weight
    unit, least = torch.finfo(dtype).eps, torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    assert ((ours - exact).abs() <= unit * exact.abs() + least + 8 * 2.0**-24 * (exact.abs() + 1e-2)).all()


@pytest.mark.parametrize("state", STATES)
def test_training_follows_float_moments(state: str) -> None:
    losses = {}
    for each in (None, state):
        layers, optimizer = pair(state=each, lr=1e-3)
        train(layers, optimizer, range(60))
        losses[each] = sum(backward(layers, number).item() for number in range(100, 105))
    assert losses[state] < 1.1 * losses[None] + 1e-4


def test_the_momentum_is_decoded_and_taken() -> None:
    layers, optimizer = pair()
    train(layers, optimizer, range(3))
    weight = layers[2].weight
    momentum = optimizer.momentum_of(weight)
    assert momentum.shape == weight.shape
    assert momentum.dtype == weight.dtype
    second = optimizer.state[weight]["exp_avg_sq_rows"].clone()
    before, taken = weight.detach().clone(), momentum * 0.9
    v = second_of(optimizer, weight)
    optimizer.zero_grad()
    weight.grad = taken.clone()
    optimizer.take_momentum([weight])
    optimizer.step()
    state = optimizer.state[weight]
    assert torch.equal(state["exp_avg_sq_rows"], second)
    assert (state["step"], state[COUNT]) == (4, 3)
    codec = nc.codec("int8")
    assert torch.equal(optimizer.momentum_of(weight), codec.decode(codec.encode(taken), 300))
    numbers = moments.step_of(1e-2, (0.9, 0.999), 1e-8, 1e-2, 4.0, 3.0)
    root = v.double().sqrt().float() * numbers.correction + numbers.eps
    assert torch.equal(weight, before * numbers.decay - taken / root * numbers.size)
    train(layers, optimizer, range(3, 4))
    assert (state["step"], state[COUNT]) == (5, 4)


def test_maximize_gives_the_momentum_the_sign_of_the_gradient() -> None:
    layers, optimizer = pair(maximize=True)
    train(layers, optimizer, range(1))
    weight = layers[2].weight
    agreeing = (optimizer.momentum_of(weight) * weight.grad >= 0).float().mean()
    assert agreeing == 1


@pytest.mark.parametrize("fused", [None, True])
def test_a_grad_scaler_drives_it(fused: bool | None) -> None:
    layers, plain = pair(fused=fused)
    other, scaled = pair(fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    train(layers, plain, range(1, 4))
    for number in range(4):
        scaled.zero_grad()
        factor = scaler.scale(torch.ones((), dtype=torch.float32)).item()
        backward(other, number, factor=float("inf") if number == 0 else factor)
        scaler.step(scaled)
        scaler.update()
    assert bits(layers, plain) == bits(other, scaled)


def test_non_contiguous_parameters_and_gradients_give_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 20, 5, 5, generator=generator, dtype=torch.float32)
    plain = values.clone().requires_grad_()
    last = values.clone().to(memory_format=torch.channels_last).requires_grad_()
    assert not last.is_contiguous()
    optimizers = [nc.optim.AdamW([each], state="int8") for each in (plain, last)]
    for _ in range(3):
        grad = torch.randn(values.shape, generator=generator, dtype=torch.float32)
        plain.grad, last.grad = grad, grad.clone().to(memory_format=torch.channels_last)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(plain, last)
    assert not last.is_contiguous()


def test_autograd_notices_that_a_parameter_was_overwritten() -> None:
    layers, optimizer = pair()
    weight = layers[2].weight
    loss = (weight * weight).sum()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_compiled_step_gives_the_same_bits() -> None:
    """Of what is held in rows: torch's own compiled step rounds otherwise than its plain one."""
    layers, other = wide(), wide()
    plain, compiled = (nc.optim.AdamW([each[2].weight, each[4].weight], state="int8") for each in (layers, other))
    torch._dynamo.reset()
    step = torch.compile(compiled.step, backend="eager")
    train(layers, plain, range(3))
    for number in range(3):
        compiled.zero_grad()
        backward(other, number)
        step()
    assert bits(layers, plain) == bits(other, compiled)


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_the_surroundings_of_a_step_do_not_change_a_bit(name: str) -> None:
    layers, plain = pair()
    with surrounded(name if name != "inference mode" else None):  # the state of a first step would be of that mode
        other, inside = pair() if "device" not in name else (None, None)
    if inside is None:
        other, inside = pair()
    train(layers, plain, range(1))
    train(other, inside, range(1))
    for layers_, optimizer, surroundings in ((layers, plain, None), (other, inside, name)):
        for number in range(1, 3):
            optimizer.zero_grad()
            backward(layers_, number)
            with surrounded(surroundings):
                optimizer.step()
    assert bits(layers, plain) == bits(other, inside)


# -- states --------------------------------------------------------------------------------------------------------


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resuming_gives_the_same_bits(state: str, dtype: torch.dtype) -> None:
    layers, optimizer = pair(state=state, dtype=dtype)
    other, again = pair(state=state, dtype=dtype, lr=5.0)
    train(layers, optimizer, range(3))
    other.load_state_dict(layers.state_dict())
    again.load_state_dict(saved(optimizer))
    assert again.state[other[2].weight]["exp_avg_rows"].dtype == torch.uint8
    train(layers, optimizer, range(3, 6))
    train(other, again, range(3, 6))
    assert bits(layers, optimizer) == bits(other, again)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_steps_as_the_original(way: str) -> None:
    both = pair()
    train(*both, range(2))
    again = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))
    train(*both, range(2, 4))
    train(*again, range(2, 4))
    assert bits(*both) == bits(*again)
    again[1].add_param_group({"params": [torch.zeros(100, 100, dtype=torch.float32)]})
    assert again[1].param_groups[-1]["state"] == "int8"


@pytest.mark.parametrize(("before", "after"), [("int8", "int4"), ("int8", None), (None, "int8"), ("bf16", "int8")])
def test_a_state_of_another_kind_is_converted(before: str | None, after: str | None) -> None:
    layers, optimizer = pair(state=before)
    other, again = pair(state=after)
    train(layers, optimizer, range(3))
    again.load_state_dict(saved(optimizer))
    weight, copied = layers[2].weight, other[2].weight
    wanted = optimizer.momentum_of(weight)
    if after is not None:
        codec = nc.codec(after)
        wanted = codec.decode(codec.encode(wanted, seed=0), 300)
    assert torch.equal(again.momentum_of(copied), wanted)
    assert again.param_groups[0].get("state") == after
    assert again.state[copied]["step"] == 3
    train(other, again, range(3, 5))
    if after is None:
        theirs = torch.optim.AdamW(layers.parameters())
        theirs.load_state_dict(again.state_dict())  # the way to torch's optimizer
        train(layers, theirs, range(1))


def test_a_state_of_torch_whose_steps_are_numbers_loads() -> None:
    layers, optimizer = pair(state=None)
    train(layers, optimizer, range(3))
    numbers = saved(optimizer)
    for held in numbers["state"].values():
        held["step"] = float(held["step"])  # as torch 1.11 saved it
    (one, first), (other, second) = pair(), pair()
    first.load_state_dict(numbers)
    second.load_state_dict(saved(optimizer))
    train(one, first, range(3, 5))
    train(other, second, range(3, 5))
    assert bits(one, first) == bits(other, second)


def test_counts_of_second_moments_survive() -> None:
    layers, optimizer = pair(dtype=torch.bfloat16)
    train(layers, optimizer, range(2))
    backward(layers, 2)
    optimizer.take_momentum(layers.parameters())
    optimizer.step()
    optimizer.state[layers[2].weight][COUNT].fill_(1001)
    for state in ("int8", "int4", None):
        other, again = pair(dtype=torch.bfloat16, state=state)
        again.load_state_dict(saved(optimizer))
        assert again.state[other[2].weight][COUNT] == 1001
        assert again.state[other[2].weight][COUNT].dtype == torch.float32


def test_a_state_of_other_parameters_or_without_its_codec_is_refused() -> None:
    layers, optimizer = pair()
    train(layers, optimizer, range(1))
    wrong = saved(optimizer)
    wrong["state"][2]["exp_avg_rows"] = wrong["state"][2]["exp_avg_rows"][:, :-16]
    with pytest.raises(StateDictError, match=r"exp_avg_rows.*\(90, 320\).*\(90, 304\)"):
        pair()[1].load_state_dict(wrong)
    nameless = saved(optimizer)
    del nameless["param_groups"][0]["state"]
    with pytest.raises(StateDictError, match="does not say in which codec"):
        pair()[1].load_state_dict(nameless)
    grads = torch.optim.AdamW(wide().parameters(), amsgrad=True)
    with pytest.raises(SpecError, match="amsgrad"):
        pair()[1].load_state_dict(saved(grads))
    with pytest.raises(ValueError, match="different number of parameter groups"):
        pair()[1].load_state_dict({"state": {}, "param_groups": []})
    theirs = torch.optim.AdamW(layers.parameters())
    theirs.load_state_dict(saved(optimizer))
    with pytest.raises(KeyError, match="exp_avg"):  # torch's does not take rows for floats
        theirs.step()


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("nonsense", "nonsense"),
        ("int8:block=row", "whole row"),
        ("int8:block=8192", "8192"),
        ("sign", "4 bits or more"),
        ("int3", "4 bits or more"),
        ("levels:table=0|1|2|3|4|5|6|7|8", "negative, zero or positive"),
        (7, "7"),
        (("int4", "int8"), "int4"),
    ],
)
def test_a_codec_that_cannot_hold_a_moment_is_refused(state: Any, words: str) -> None:
    with pytest.raises((NarrowcastError, TypeError), match=words):
        nc.optim.AdamW(wide().parameters(), state=state)


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable"])
def test_an_option_that_rows_do_not_support_is_refused(option: str) -> None:
    with pytest.raises(SpecError, match=rf"state='int8' with {option}=True"):
        nc.optim.AdamW(wide().parameters(), state="int8", **{option: True})
    optimizer = nc.optim.AdamW([torch.zeros(3, dtype=torch.float32)], state="int8")
    with pytest.raises(SpecError, match=option):
        optimizer.add_param_group({"params": list(wide().parameters()), option: True})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_and_parameters_of_two_groups_are_refused() -> None:
    table = nn.Embedding(200, 80, sparse=True)
    optimizer = nc.optim.AdamW(table.parameters(), state="int8")
    table(torch.tensor([1], dtype=torch.int64)).sum().backward()
    with pytest.raises(NarrowcastError, match="sparse"):
        optimizer.step()
    assert not optimizer.state
    layers = wide()
    with pytest.raises(ValueError, match="more than one parameter group"):
        nc.optim.AdamW([{"params": [layers[2].weight]}, {"params": [layers[2].weight]}], state="int8")
