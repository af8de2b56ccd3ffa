"""The momentum travels in place of gradients: what arrives, to the bit, and what it takes."""

from __future__ import annotations

from typing import Any

import faults
import hosted
import pytest
import torch
import trained
from momentum_runs import BETA1, BETA2, REFRESH, SHAPES, STEPS, WARMUP, made, step_once
from ranks import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from cases import same_bits
from narrowcast.errors import CollectiveError

pytestmark = pytest.mark.timeout(180)


def _sends_gradients(step: int) -> bool:
    return step < WARMUP or (step - WARMUP + 1) % REFRESH == 0


def _in_bf16(gradients: list[torch.Tensor], local: int) -> torch.Tensor:
    """The average of an exempt gradient beside a momentum: what a rank, or host, sends is rounded, and the average."""
    each = [gradients[start : start + (local or 1)] for start in range(0, len(gradients), local or 1)]
    sent = [trained.average(terms, 1).bfloat16().float() for terms in each]
    return trained.average(sent, len(gradients)).bfloat16().float()


def _expected(world: int, codec: str, local: int = 0) -> list[trained.Named]:
    """The same in one process: `.grad` of each step on every rank."""

    def reducer(spec: str, feedback: bool) -> Any:
        if local:
            return hosted.HostExpected(nc.codec(spec), world // local, local, feedback)
        return trained.Expected(nc.codec(spec), world, feedback, [trained.SEED] * world)

    gradients, momentums = reducer("int2", False), reducer(codec, True)
    first = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    second, updates = {name: torch.zeros(shape) for name, shape in SHAPES.items()}, 0
    compressed = {name for name, shape in SHAPES.items() if not trained.exempt(shape, world)}
    averages = []
    for step in range(STEPS):
        given = [trained.given(SHAPES, rank, step) for rank in range(world)]
        if _sends_gradients(step):
            average = gradients.step(given)
            updates += 1
            for name in compressed:
                first[name] = first[name].lerp(average[name], 1 - BETA1)
                second[name] = (second[name] * BETA2).addcmul(average[name], average[name], value=1 - BETA2)
        else:
            root = (1 - BETA2**updates) ** 0.5
            divisors = {name: second[name].sqrt() / root + 1e-8 for name in compressed}

            moved = [
                {
                    name: (g.lerp(first[name], BETA1) / divisors[name]).clamp(-4, 4) if name in divisors else g
                    for name, g in of_rank.items()
                }
                for of_rank in given
            ]
            average = momentums.step(moved)
            average |= {name: average[name] * divisor for name, divisor in divisors.items()}
            average |= {name: _in_bf16([g[name] for g in given], local) for name in SHAPES if name not in divisors}
            first |= {name: average[name] for name in compressed}
        averages.append(average)
    return averages


def _arriving(rank: int, codec: str, hosts: int = 0, buckets: float = trained.FEW) -> list[trained.Named]:
    if hosts:
        hosted.launched(rank, hosts, 2)
    ddp, optimizer, _ = made(codec, buckets=buckets, refresh=REFRESH)
    return [step_once(ddp, optimizer, rank, step) for step in range(STEPS)]


@pytest.mark.parametrize("codec", ["sign", "int2", "nf4:block=32"])
def test_the_average_of_all_momentums_arrives_and_gradients_where_they_are_due(codec: str) -> None:
    meant = _expected(3, codec)
    for found in run(3, _arriving, codec):
        trained.agree(found, meant)


def test_exempt_gradients_in_bf16_do_not_depend_on_who_owns_them_in_which_bucket() -> None:
    """One bucket gives each rank other elements than several do. An owner's own part is rounded like all others."""
    meant = _expected(3, "sign")
    for found in run(3, _arriving, "sign", 0, 25.0):
        trained.agree(found, meant)


def _of_wide_floats(rank: int, dtype: torch.dtype) -> Any:
    """Exempt gradients of one step with a momentum, beside those that were given."""
    ddp = DDP(trained.Given(SHAPES, dtype))
    optimizer = nc.optim.AdamW(ddp.parameters(), 1e-3)
    nc.compress_gradients(ddp, "sign", momentum=optimizer, warmup_steps=1)
    for step in range(2):
        grads = trained.backward(ddp, trained.given(SHAPES, 0, step, dtype))
        optimizer.step()
    return grads["bias"], trained.given(SHAPES, 0, 1, dtype)["bias"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_exempt_gradients_of_half_precision_lose_nothing_beside_a_momentum(dtype: torch.dtype) -> None:
    """The average of two equal gradients is that gradient: rounded to bf16 if it has more bits than 16."""
    for found, given in run(2, _of_wide_floats, dtype):
        meant = given.bfloat16().to(dtype) if dtype.itemsize > 2 else given
        assert same_bits(found, meant)
        assert (found != given).any() == (dtype.itemsize > 2)


def test_the_momentum_travels_between_hosts() -> None:
    meant = _expected(4, "sign", local=2)
    for found in run(4, _arriving, "sign", 2):
        trained.agree(found, meant)


def _like_torch(rank: int) -> Any:
    """What exempt parameters become, beside torch's AdamW with the averages of their gradients."""
    ddp, optimizer, _ = made(lr=0.01)
    plain = trained.Given(SHAPES)
    theirs = torch.optim.AdamW(plain.parameters(), 0.01, betas=(BETA1, BETA2), foreach=True)
    for step in range(STEPS):
        grads = step_once(ddp, optimizer, rank, step)
        for name, parameter in plain.named_parameters():
            parameter.grad = grads[name].clone()
        theirs.step()
    exempt = [name for name, shape in SHAPES.items() if trained.exempt(shape, 2)]
    ours, others = trained.parameters_of(ddp), trained.parameters_of(plain)
    return exempt, all(same_bits(ours[name], others[name]) for name in exempt), ours


def test_exempt_parameters_are_stepped_as_by_torch() -> None:
    results = run(2, _like_torch)
    for exempt, alike, _ in results:
        assert exempt
        assert alike
    first, second = results[0][2], results[1][2]
    assert all(same_bits(first[name], second[name]) for name in first)


def _conv(rank: int, layout: torch.memory_format) -> trained.Named:
    torch.manual_seed(3)
    model = nn.Conv2d(16, 32, 3).to(memory_format=layout)
    ddp = DDP(model, gradient_as_bucket_view=layout is torch.channels_last)
    optimizer = nc.optim.AdamW(ddp.parameters(), 0.01)
    nc.compress_gradients(ddp, "int4", momentum=optimizer, warmup_steps=2, warmup_codec="int8", exempt="bias")
    for step in range(5):
        generator = torch.Generator().manual_seed(100 * rank + step)
        x = torch.randn(2, 16, 8, 8, generator=generator).to(memory_format=layout)
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        for p in ddp.parameters():  # the order of elements decides which share a scale
            assert p.grad is not None
            assert p.grad.stride() == p.stride()
        optimizer.step()
    return {name: p.detach().contiguous() for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_momentum_lies_as_its_parameter_does(layout: torch.memory_format) -> None:
    first, second = run(2, _conv, layout)
    plain = run(2, _conv_uncompressed)[0]
    for name, one in first.items():
        assert same_bits(one, second[name])
    # Five steps of 0.01 move a weight by 0.05 at most. A momentum in another order would be as far off as that.
    assert (first["weight"] - plain["weight"]).abs().mean() < 0.005


def _conv_uncompressed(rank: int) -> trained.Named:
    torch.manual_seed(3)
    ddp = DDP(nn.Conv2d(16, 32, 3))
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.01)
    for step in range(5):
        generator = torch.Generator().manual_seed(100 * rank + step)
        optimizer.zero_grad()
        ddp(torch.randn(2, 16, 8, 8, generator=generator)).square().mean().backward()
        optimizer.step()
    return {name: p.detach() for name, p in ddp.module.named_parameters()}


def _by_hand(rank: int) -> Any:
    ddp = DDP(trained.Given(SHAPES), bucket_cap_mb=trained.FEW)
    optimizer = nc.optim.AdamW(ddp.parameters(), 1e-3, betas=(BETA1, BETA2))
    options: Any = {"momentum": optimizer, "warmup_steps": WARMUP, "seed": trained.SEED, "refresh": REFRESH}
    ddp.register_comm_hook(nc.GradientCompression("sign", model=ddp.module, **options), nc.gradient_hook)
    arriving = [step_once(ddp, optimizer, rank, step) for step in range(STEPS)]
    step_once(ddp, optimizer, rank, STEPS)  # which refreshes
    trained.backward(ddp, trained.given(SHAPES, rank, STEPS))
    return arriving, faults.error_of(lambda: ddp(trained.given(SHAPES, rank, STEPS)).backward())[0]


def test_a_hook_that_is_registered_by_hand_sends_the_same_and_notices_the_same() -> None:
    meant = _expected(2, "sign")
    for found, error in run(2, _by_hand):
        trained.agree(found, meant)
        assert isinstance(error, CollectiveError), error


def _alone(rank: int) -> Any:
    ddp, optimizer, compression = made(lr=0.01)
    plain = trained.Given(SHAPES)
    theirs = torch.optim.AdamW(plain.parameters(), 0.01, betas=(BETA1, BETA2))
    for step in range(STEPS):
        step_once(ddp, optimizer, rank, step)
        theirs.zero_grad()
        plain(trained.given(SHAPES, rank, step)).backward()
        theirs.step()
    return trained.parameters_of(ddp), trained.parameters_of(plain), compression.stats().sent_bytes


def test_one_rank_sends_nothing_and_is_stepped_by_torch() -> None:
    ((ours, theirs, sent),) = run(1, _alone)
    assert sent == 0
    trained.agree([ours], [theirs])


def _bytes(rank: int, vector: int) -> Any:
    ddp = DDP(trained.Given({"large": (1024, 1024), "vector": (vector,)}))
    optimizer = nc.optim.AdamW(ddp.parameters(), 1e-3)
    compression = nc.compress_gradients(ddp, "sign", momentum=optimizer, warmup_steps=1)
    sent: list[int] = []
    for _ in range(3):
        before = compression.stats().sent_bytes
        trained.backward(ddp, {"large": torch.randn(1024, 1024), "vector": torch.randn(vector)})
        optimizer.step()
        sent.append(compression.stats().sent_bytes - before)
    return sent, compression.stats().plain_bytes // 3


@pytest.mark.parametrize("vector", [1, 3000])
def test_a_momentum_in_sign_takes_a_24th_of_fp32(vector: int) -> None:
    """A GPT of 10.9 million parameters has 2.8 elements in vectors for a thousand in matrices: here 2.9."""
    for sent, plain in run(2, _bytes, vector):
        assert sent[1] == sent[2]
        assert sent[1] * 24 <= plain, (sent, plain)
        assert sent[0] * 13 <= plain  # the warm-up, in int2: 32 bits to 2.25, but for exempt ones and headers
