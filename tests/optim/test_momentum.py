"""A momentum that travelled: `.grad` of a marked parameter becomes its first moment, and its second moment stays."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from small_training import backward, bits, groups, model, train, twins
from torch import Tensor, nn

import narrowcast as nc
from ambient import SURROUNDINGS, surrounded
from narrowcast.errors import NarrowcastError, OptimizerError

COUNT = "exp_avg_sq_steps"


def hand_over(layers: nn.Module, optimizer: Any) -> list[Tensor]:
    """Form the momentum of every parameter that has a gradient, as one rank alone does, and hand it over."""
    parameters = [parameter for parameter in layers.parameters() if parameter.grad is not None]
    for parameter in parameters:
        momentum = optimizer.momentum_of(parameter)
        parameter.grad = torch.lerp(momentum, parameter.grad, 1 - optimizer.beta1_of(parameter))
    optimizer.take_momentum(parameters)
    return parameters


def by_hand(optimizer: Any, parameter: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
    """The parameter and the first moment after a step with a momentum, one plain operation at a time."""
    group = next(group for group in optimizer.param_groups if any(each is parameter for each in group["params"]))
    state = optimizer.state[parameter]
    step, count = float(state["step"]) + 1, float(state.get(COUNT, state["step"]))
    beta1, beta2 = group["betas"]
    first = -momentum if group["maximize"] else momentum
    second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    decayed = parameter.detach() * (1 - group["lr"] * group["weight_decay"])
    denominator = second.sqrt() / (1 - beta2**count) ** 0.5 + group["eps"]
    return torch.addcdiv(decayed, first, denominator, value=-(group["lr"] / (1 - beta1**step))), first


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_step_with_a_momentum_is_this_formula(options: dict[str, Any], dtype: torch.dtype) -> None:
    layers = model(dtype)
    optimizer = nc.optim.AdamW(groups(layers), lr=1e-2, **options)
    train(layers, optimizer, range(3))
    for number in range(3, 6):
        optimizer.zero_grad()
        backward(layers, number)
        parameters = hand_over(layers, optimizer)
        second = [optimizer.state[parameter]["exp_avg_sq"].clone() for parameter in parameters]
        wanted = [by_hand(optimizer, parameter, parameter.grad.clone()) for parameter in parameters]
        optimizer.step()
        for parameter, before, (value, first) in zip(parameters, second, wanted, strict=True):
            state = optimizer.state[parameter]
            assert torch.equal(parameter, value)
            assert torch.equal(state["exp_avg"], first)
            assert torch.equal(state["exp_avg_sq"], before)
            assert (state["step"], state[COUNT]) == (number + 1, 3)


def test_a_gradient_after_momentums_updates_the_second_moment_with_its_own_count() -> None:
    layers = model()
    optimizer = nc.optim.AdamW(groups(layers), lr=1e-2)
    train(layers, optimizer, range(2))
    train(layers, optimizer, range(2, 7), before=lambda: hand_over(layers, optimizer))
    parameter = layers[0].weight
    state = copy.deepcopy(optimizer.state[parameter])
    optimizer.zero_grad()
    backward(layers, 7)
    before, grad = parameter.detach().clone(), parameter.grad.clone()
    optimizer.step()
    first = torch.lerp(state["exp_avg"], grad, 1 - 0.9)
    second = (state["exp_avg_sq"] * 0.999).addcmul(grad, grad, value=1 - 0.999)
    denominator = second.sqrt() / (1 - 0.999**3) ** 0.5 + 1e-8  # two gradients, five momentums, one gradient
    wanted = torch.addcdiv(before * (1 - 1e-2 * 0.1), first, denominator, value=-(1e-2 / (1 - 0.9**8)))
    assert torch.equal(parameter, wanted)
    assert optimizer.state[parameter][COUNT] == 3
    assert optimizer.state[parameter]["step"] == 8


def test_maximizing_the_opposite_gives_the_same_bits() -> None:
    results = []
    for maximize, layers in zip((False, True), twins(), strict=True):
        optimizer = nc.optim.AdamW(groups(layers), maximize=maximize)
        for number in range(6):
            optimizer.zero_grad()
            backward(layers, number, factor=-1.0 if maximize else 1.0)
            if number > 2:
                hand_over(layers, optimizer)
            optimizer.step()
        results.append([each.detach().clone() for each in layers.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_some_parameters_take_a_momentum_and_the_others_step_as_in_torch() -> None:
    ours, theirs = twins()
    mine, reference = nc.optim.AdamW(groups(ours)), torch.optim.AdamW(groups(theirs))
    train(ours, mine, range(2))
    train(theirs, reference, range(2))
    for layers, optimizer in ((ours, mine), (theirs, reference)):
        optimizer.zero_grad()
        backward(layers, 2)
    mine.take_momentum([ours[0].weight])
    mine.step()
    reference.step()
    assert torch.equal(ours[2].weight, theirs[2].weight)
    assert torch.equal(ours[0].bias, theirs[0].bias)
    assert not torch.equal(ours[0].weight, theirs[0].weight)
    assert torch.equal(mine.state[ours[0].weight]["exp_avg"], ours[0].weight.grad)


def test_marks_wait_for_the_step_and_are_gone_after_it() -> None:
    layers = model()
    optimizer = nc.optim.AdamW(layers.parameters())
    train(layers, optimizer, range(1))
    assert not optimizer.momentum_pending
    optimizer.take_momentum(iter([layers[0].weight, layers[0].weight]))
    assert optimizer.momentum_pending == {layers[0].weight}
    optimizer.zero_grad()
    assert optimizer.momentum_pending == {layers[0].weight}
    before = layers[0].weight.clone()
    optimizer.step()  # without a .grad there is no momentum either: the parameter is left alone, as torch leaves it
    assert torch.equal(layers[0].weight, before)
    assert not optimizer.momentum_pending


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"state": "bf16"}], ids=str)
def test_what_expects_a_momentum_counts_from_its_first_step_and_has_the_same_bits(options: dict[str, Any]) -> None:
    layers, other = twins()
    first, second = nc.optim.AdamW(groups(layers), **options), nc.optim.AdamW(groups(other), **options)
    first.expect_momentum(layers.parameters())
    for each, optimizer in ((layers, first), (other, second)):
        train(each, optimizer, range(2))
        assert all((COUNT in optimizer.state[parameter]) == (optimizer is first) for parameter in each.parameters())
        train(each, optimizer, range(2, 4), before=lambda each=each, optimizer=optimizer: hand_over(each, optimizer))
        train(each, optimizer, range(4, 6))
    assert bits(layers, first) == bits(other, second)
    copied = copy.deepcopy(first)
    assert len(copied._expected) == len(copied._behind) == 4
    with pytest.raises(OptimizerError, match="does not hold"):
        first.expect_momentum([torch.zeros(3, dtype=torch.float32)])


def test_a_mark_can_be_taken_back() -> None:
    """A GradScaler that finds an overflow calls no step: the marks wait, and the next `.grad` may be a gradient."""
    layers, other = twins()
    first, second = nc.optim.AdamW(groups(layers)), nc.optim.AdamW(groups(other))
    train(layers, first, range(2))
    train(other, second, range(2))
    first.take_momentum(layers.parameters())
    first.take_gradient(parameter for parameter in layers.parameters())
    first.take_gradient(layers.parameters())
    assert not first.momentum_pending
    train(layers, first, range(2, 4))
    train(other, second, range(2, 4))
    assert bits(layers, first) == bits(other, second)


def test_a_closure_may_hand_over() -> None:
    layers, other = twins()
    first, second = nc.optim.AdamW(layers.parameters()), nc.optim.AdamW(other.parameters())
    train(layers, first, range(2))
    train(other, second, range(2))

    def closure() -> float:
        first.zero_grad()
        loss = backward(layers, 2).item()
        hand_over(layers, first)
        return loss

    first.step(closure)
    train(other, second, range(2, 3), before=lambda: hand_over(other, second))
    assert bits(layers, first) == bits(other, second)


def test_momentum_of_is_the_state_itself_or_zeros() -> None:
    layers = model()
    optimizer = nc.optim.AdamW(groups(layers))
    weight = layers[0].weight
    zeros = optimizer.momentum_of(weight)
    assert zeros.shape == weight.shape
    assert not zeros.any()
    assert not zeros.requires_grad
    assert not optimizer.state  # asking makes no state
    train(layers, optimizer, range(1))
    assert optimizer.momentum_of(weight) is optimizer.state[weight]["exp_avg"]
    assert (optimizer.beta1_of(weight), optimizer.beta1_of(layers[0].bias)) == (0.9, 0.8)


def test_parameters_may_come_and_groups_may_move() -> None:
    layers = model()
    optimizer = nc.optim.AdamW(layers[0].parameters())
    with pytest.raises(OptimizerError, match="does not hold a tensor of shape"):
        optimizer.beta1_of(layers[2].weight)
    optimizer.add_param_group({"params": layers[2].parameters(), "betas": (0.5, 0.9)})
    assert optimizer.beta1_of(layers[2].weight) == 0.5
    optimizer.param_groups.reverse()
    assert optimizer.beta1_of(layers[2].weight) == 0.5
    assert optimizer.beta1_of(layers[0].weight) == 0.9
    optimizer.param_groups.pop(0)
    with pytest.raises(OptimizerError, match="does not hold"):
        optimizer.beta1_of(layers[2].weight)


@pytest.mark.parametrize(
    ("stranger", "words"), [(torch.zeros(3, dtype=torch.float32), "shape \\(3,\\)"), ("weight", "'weight'")]
)
def test_a_stranger_is_refused_and_nothing_is_marked(stranger: Any, words: str) -> None:
    layers = model()
    optimizer = nc.optim.AdamW(layers.parameters())
    train(layers, optimizer, range(1))
    for call in (optimizer.momentum_of, optimizer.beta1_of):
        with pytest.raises(OptimizerError, match=words):
            call(stranger)
    with pytest.raises(NarrowcastError, match=words):
        optimizer.take_momentum([layers[0].weight, stranger])
    assert not optimizer.momentum_pending


def test_a_parameter_without_a_second_moment_is_refused() -> None:
    layers = model()
    optimizer = nc.optim.AdamW(layers.parameters())
    with pytest.raises(OptimizerError, match=r"no second moment yet.*warmup_steps"):
        optimizer.take_momentum(layers.parameters())
    train(layers, optimizer, range(1))
    optimizer.take_momentum(layers.parameters())
    optimizer.state.clear()
    backward(layers, 1)
    with pytest.raises(OptimizerError, match="no second moment yet"):
        optimizer.step()


def test_differentiable_steps_and_sparse_momentums_are_refused() -> None:
    weight = torch.ones(4, dtype=torch.float32).clone().requires_grad_()
    optimizer = nc.optim.AdamW([weight], differentiable=True)
    with pytest.raises(OptimizerError, match="differentiable=True"):
        optimizer.take_momentum([weight])
    table = nn.Embedding(4, 3)
    optimizer = nc.optim.AdamW(table.parameters())
    table.weight.grad = torch.ones_like(table.weight)
    optimizer.step()
    table.weight.grad = table.weight.detach().to_sparse()
    optimizer.take_momentum([table.weight])
    with pytest.raises(OptimizerError, match="sparse"):
        optimizer.step()


@pytest.mark.parametrize("fused", [None, True])
def test_a_grad_scaler_scales_momentums_and_skips_steps(fused: bool | None) -> None:
    """A power of two scales without rounding, so the bits are those of a run without a scaler."""
    layers, other = twins()
    plain, scaled = nc.optim.AdamW(groups(layers), fused=fused), nc.optim.AdamW(groups(other), fused=fused)
    train(layers, plain, range(2))
    train(layers, plain, range(3, 5), before=lambda: hand_over(layers, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for number in range(5):
        scaled.zero_grad()
        factor = scaler.scale(torch.ones((), dtype=torch.float32)).item()
        backward(other, number, factor=float("inf") if number == 2 else factor)
        if number >= 2:  # what is handed over has the scale of the loss
            for parameter in other.parameters():
                momentum = scaled.momentum_of(parameter) * factor
                parameter.grad = torch.lerp(momentum, parameter.grad, 1 - scaled.beta1_of(parameter))
            scaled.take_momentum(other.parameters())
        scaler.step(scaled)
        assert bool(scaled.momentum_pending) == (number == 2 and not fused)  # then the scaler calls no step
        scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert bits(layers, plain) == bits(other, scaled)


def test_clipping_clips_the_momentum() -> None:
    layers = model()
    optimizer = nc.optim.AdamW(layers.parameters())
    train(layers, optimizer, range(2))
    optimizer.zero_grad()
    backward(layers, 2)
    hand_over(layers, optimizer)
    nn.utils.clip_grad_norm_(layers.parameters(), 1e-3)
    optimizer.step()
    momentums = torch.cat([optimizer.momentum_of(each).flatten() for each in layers.parameters()])
    assert momentums.norm() <= 1e-3


def test_states_with_counts_resume_to_the_bit_and_load_into_torch() -> None:
    layers, other = twins(torch.bfloat16)
    first, second = nc.optim.AdamW(groups(layers)), nc.optim.AdamW(groups(other))
    train(layers, first, range(2))
    train(layers, first, range(2, 4), before=lambda: hand_over(layers, first))
    for parameter in layers.parameters():
        first.state[parameter][COUNT].fill_(1001)  # a number that bf16 does not have
        first.state[parameter]["step"].fill_(3001)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    other.load_state_dict(layers.state_dict())
    assert second.state[other[0].weight][COUNT] == 1001
    for optimizer, each in ((first, layers), (second, other)):
        train(each, optimizer, range(4, 6), before=lambda each=each, optimizer=optimizer: hand_over(each, optimizer))
        train(each, optimizer, range(6, 8))
    assert bits(layers, first) == bits(other, second)
    reference = torch.optim.AdamW(groups(other))
    reference.load_state_dict(first.state_dict())
    train(other, reference, range(8, 10))
    second.load_state_dict(reference.state_dict())
    assert second.state[other[0].weight]["step"] == 3007


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_keeps_the_marks(way: str) -> None:
    layers = model()
    optimizer = nc.optim.AdamW(groups(layers))
    train(layers, optimizer, range(2))
    optimizer.zero_grad()
    backward(layers, 2)
    hand_over(layers, optimizer)
    grads = [each.grad.clone() for each in layers.parameters()]
    pair = (layers, optimizer)
    again, copied = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    for parameter, grad in zip(again.parameters(), grads, strict=True):
        parameter.grad = grad  # pickling a Parameter leaves .grad behind
    optimizer.step()
    copied.step()
    assert bits(layers, optimizer) == bits(again, copied)


def test_a_compiled_step_takes_momentums_outside_of_its_graph() -> None:
    layers, other = twins()
    plain, compiled = nc.optim.AdamW(groups(layers)), nc.optim.AdamW(groups(other))
    train(layers, plain, range(2))
    train(other, compiled, range(2))
    torch._dynamo.reset()
    step = torch.compile(compiled.step, backend="eager")
    for number in range(2, 5):
        compiled.zero_grad()
        backward(other, number)
        hand_over(other, compiled)
        step()
    train(layers, plain, range(2, 5), before=lambda: hand_over(layers, plain))
    assert bits(layers, plain) == bits(other, compiled)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_parameters_of_any_shape(shape: tuple[int, ...]) -> None:
    weight = torch.full(shape, 2.0, dtype=torch.float32).requires_grad_()
    optimizer = nc.optim.AdamW([weight])
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        weight.grad = optimizer.momentum_of(weight).clone()
        optimizer.take_momentum([weight])
        optimizer.step()
    assert (weight < 2.0).all()


def test_complex_and_non_contiguous_parameters() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(6, 4, 2, generator=generator, dtype=torch.float32)
    complex_ = torch.view_as_complex(values).clone().requires_grad_()
    pairs = values.clone().requires_grad_()
    turned = values.clone().transpose(0, 1).detach().requires_grad_()
    assert not turned.is_contiguous()
    optimizers = [nc.optim.AdamW([each]) for each in (complex_, pairs, turned)]
    for number in range(4):
        grad = torch.randn(6, 4, 2, generator=generator, dtype=torch.float32)
        complex_.grad, pairs.grad, turned.grad = torch.view_as_complex(grad), grad.clone(), grad.transpose(0, 1)
        for optimizer, each in zip(optimizers, (complex_, pairs, turned), strict=True):
            if number >= 2:
                optimizer.take_momentum([each])
            optimizer.step()
    assert torch.equal(torch.view_as_real(complex_.detach()), pairs)
    assert torch.equal(turned.transpose(0, 1), pairs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_momentum_that_is_not_finite_shows(bad: float) -> None:
    """Nothing hides an overflow: whoever wants to skip such a step uses a GradScaler or looks at `.grad`."""
    layers = model()
    optimizer = nc.optim.AdamW(layers.parameters())
    train(layers, optimizer, range(1))
    layers[0].weight.grad.fill_(bad)
    optimizer.take_momentum([layers[0].weight])
    optimizer.step()
    assert not layers[0].weight.isfinite().any()
    assert layers[2].weight.isfinite().all()


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_the_surroundings_of_a_step_do_not_change_a_bit(name: str) -> None:
    layers, other = twins()
    first, second = nc.optim.AdamW(groups(layers)), nc.optim.AdamW(groups(other))
    train(layers, first, range(2))
    train(other, second, range(2))
    for optimizer, each, surroundings in ((first, layers, None), (second, other, name)):
        for number in range(2, 4):
            optimizer.zero_grad()
            backward(each, number)
            hand_over(each, optimizer)
            with surrounded(surroundings):
                optimizer.step()
    assert bits(layers, first) == bits(other, second)
