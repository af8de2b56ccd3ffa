"""The momentum travels in place of gradients: what arrives, to the bit, also after a resume; and what is refused."""

from __future__ import annotations

import io
from typing import Any

import faults
import hosted
import pytest
import torch
import trained
from ranks import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import narrowcast as nc
from cases import same_bits
from narrowcast.errors import CollectiveError, NarrowcastError, OptimizerError, SpecError, StateDictError

pytestmark = pytest.mark.timeout(180)

SHAPES, WARMUP, STEPS, REFRESH = trained.SHAPES, 2, 9, 4
BETA1, BETA2 = 0.9, 0.95


def _made(codec: str = "sign", *, lr: float = 1e-3, fused: bool = False, **options: Any) -> Any:
    ddp = DDP(trained.Given(SHAPES), bucket_cap_mb=trained.FEW)
    optimizer = nc.optim.AdamW(ddp.parameters(), lr, betas=(BETA1, BETA2), fused=fused)
    options = {"warmup_steps": WARMUP, "seed": trained.SEED, **options}
    return ddp, optimizer, nc.compress_gradients(ddp, codec, momentum=optimizer, **options)


def _step(ddp: nn.Module, optimizer: Any, rank: int, step: int) -> trained.Named:
    """What `.grad` is after a backward; then the optimizer steps."""
    grads = trained.backward(ddp, trained.given(SHAPES, rank, step))
    optimizer.step()
    return grads


# -- what arrives -----------------------------------------------------------------------------------------------------


def _sends_gradients(step: int) -> bool:
    return step < WARMUP or (step - WARMUP + 1) % REFRESH == 0


def _expected(world: int, codec: str, local: int = 0) -> list[trained.Named]:
    """The same in one process: `.grad` of each step on every rank."""

    def reducer(spec: str, feedback: bool) -> Any:
        if local:
            return hosted.HostExpected(nc.codec(spec), world // local, local, feedback)
        return trained.Expected(nc.codec(spec), world, feedback, [trained.SEED] * world)

    gradients, momentums = reducer("int8", False), reducer(codec, True)
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
            first |= {name: average[name] for name in compressed}
        averages.append(average)
    return averages


def _arriving(rank: int, codec: str, hosts: int = 0) -> list[trained.Named]:
    if hosts:
        hosted.launched(rank, hosts, 2)
    ddp, optimizer, _ = _made(codec, refresh=REFRESH)
    return [_step(ddp, optimizer, rank, step) for step in range(STEPS)]


@pytest.mark.parametrize("codec", ["sign", "int2", "nf4:block=32"])
def test_the_average_of_all_momentums_arrives_and_gradients_where_they_are_due(codec: str) -> None:
    meant = _expected(3, codec)
    for found in run(3, _arriving, codec):
        trained.agree(found, meant)


def test_the_momentum_travels_between_hosts() -> None:
    meant = _expected(4, "sign", local=2)
    for found in run(4, _arriving, "sign", 2):
        trained.agree(found, meant)


def _like_torch(rank: int) -> Any:
    """What exempt parameters become, beside torch's AdamW with the averages of their gradients."""
    ddp, optimizer, _ = _made(lr=0.01)
    plain = trained.Given(SHAPES)
    theirs = torch.optim.AdamW(plain.parameters(), 0.01, betas=(BETA1, BETA2), foreach=True)
    for step in range(STEPS):
        grads = _step(ddp, optimizer, rank, step)
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
    nc.compress_gradients(ddp, "int4", momentum=optimizer, warmup_steps=2, exempt="bias")
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
    arriving = [_step(ddp, optimizer, rank, step) for step in range(STEPS)]
    _step(ddp, optimizer, rank, STEPS)  # which refreshes
    trained.backward(ddp, trained.given(SHAPES, rank, STEPS))
    return arriving, faults.error_of(lambda: ddp(trained.given(SHAPES, rank, STEPS)).backward())[0]


def test_a_hook_that_is_registered_by_hand_sends_the_same_and_notices_the_same() -> None:
    meant = _expected(2, "sign")
    for found, error in run(2, _by_hand):
        trained.agree(found, meant)
        assert isinstance(error, CollectiveError), error


# -- accumulation, clipping, scaling ----------------------------------------------------------------------------------


def _accumulated(rank: int, synchronized: bool) -> Any:
    ddp, optimizer, _ = _made()
    for step in range(WARMUP):
        _step(ddp, optimizer, rank, step)
    ddp.zero_grad()

    def twice() -> None:
        halves = [{name: g / 2 for name, g in trained.given(SHAPES, rank, WARMUP).items()}] * 2
        if synchronized:
            ddp(halves[0]).backward()
        else:
            with ddp.no_sync():
                ddp(halves[0]).backward()
        ddp(halves[1]).backward()

    error, _ = faults.error_of(twice)
    return error, trained.grads(ddp), optimizer


def _accumulated_without_sync(rank: int) -> Any:
    error, grads, _ = _accumulated(rank, synchronized=False)
    assert error is None
    ddp, optimizer, _ = _made()
    for step in range(WARMUP):
        _step(ddp, optimizer, rank, step)
    return grads, _step(ddp, optimizer, rank, WARMUP)


def test_gradients_may_be_accumulated_under_no_sync() -> None:
    for accumulated, at_once in run(2, _accumulated_without_sync):
        trained.agree([accumulated], [at_once])


def _accumulated_with_sync(rank: int) -> Any:
    error, _, optimizer = _accumulated(rank, synchronized=True)
    ddp, optimizer, _ = _made()
    for step in range(WARMUP + 1):
        _step(ddp, optimizer, rank, step)  # another model is not disturbed
    return error


def test_a_momentum_that_no_step_has_used_is_not_added_to() -> None:
    for error in run(2, _accumulated_with_sync):
        assert isinstance(error, CollectiveError), error
        assert "no_sync" in str(error)
        assert "optimizer.step()" in str(error)


def _skipped(rank: int, set_to_none: bool) -> Any:
    """A step that the script does not take, by a rule of its own: the next one is as if it had not been."""
    found = []
    for skips in (True, False):
        ddp, optimizer, compression = _made()
        for step in range(WARMUP + 2):
            grads = _step(ddp, optimizer, rank, step)
        if skips:
            ddp.zero_grad(set_to_none=set_to_none)
            ddp(trained.given(SHAPES, rank, 77)).backward()
            ddp.zero_grad(set_to_none=set_to_none)
        compression.forget()
        ddp.zero_grad(set_to_none=set_to_none)
        ddp(trained.given(SHAPES, rank, STEPS)).backward()
        optimizer.step()
        found.append((trained.grads(ddp), trained.parameters_of(ddp)))
        del grads
    return found


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_that_is_not_taken_leaves_the_momentum_as_it_was(set_to_none: bool) -> None:
    for skipped, plain in run(2, _skipped, set_to_none):
        trained.agree(skipped, plain)


def _clipped(rank: int) -> Any:
    ddp, optimizer, _ = _made(lr=0.01)
    for step in range(WARMUP):
        _step(ddp, optimizer, rank, step)
    trained.backward(ddp, trained.given(SHAPES, rank, WARMUP))
    before = trained.grads(ddp)
    norm = nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
    optimizer.step()
    momentum = optimizer.momentum_of(ddp.module.get_parameter("even"))
    return float(norm), before["even"], momentum.clone()


def test_clipping_clips_the_momentum() -> None:
    for norm, before, momentum in run(2, _clipped):
        assert norm > 0.5
        assert same_bits(momentum, before * torch.clamp(torch.tensor(0.5) / (norm + 1e-6), max=1.0))


def _scaled(rank: int, scaling: bool, fused: bool, overflow: bool) -> Any:
    """With a GradScaler: its scale is a power of two, and nothing here under- or overflows, so no bit changes."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=scaling)
    ddp, optimizer, _ = _made(lr=0.01, fused=fused, scaler=scaler if scaling else None)
    for step in range(STEPS):
        gradients = trained.given(SHAPES, rank, step)
        if overflow and step == 5:
            if not scaling:
                continue
            gradients["odd"][0, 0] = float("inf")
        optimizer.zero_grad()
        scaler.scale(ddp(gradients)).backward()
        scaler.step(optimizer)
        scaler.update()
    return trained.parameters_of(ddp), scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflow", [False, True])
def test_a_grad_scaler_changes_no_bit(fused: bool, overflow: bool) -> None:
    scaled, plain = run(2, _scaled, True, fused, overflow), run(2, _scaled, False, fused, overflow)
    for (found, scale), (meant, _) in zip(scaled, plain, strict=True):
        assert scale != 2.0**10  # it did change
        trained.agree([found], [meant])


def _scaler_not_named(rank: int, fused: bool) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    ddp, optimizer, _ = _made(fused=fused)
    errors = []
    for step in range(WARMUP + 1):
        optimizer.zero_grad()
        scaler.scale(ddp(trained.given(SHAPES, rank, step))).backward()
        before = trained.parameters_of(ddp)
        errors.append(faults.error_of(lambda: scaler.step(optimizer))[0])
        after = trained.parameters_of(ddp)
        scaler.update()
    return errors, all(same_bits(before[name], after[name]) for name in before)


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_that_was_not_named_is_refused_when_the_momentum_is_due(fused: bool) -> None:
    for errors, unchanged in run(2, _scaler_not_named, fused):
        assert errors[:WARMUP] == [None] * WARMUP
        assert isinstance(errors[-1], OptimizerError), errors
        assert "scaler=" in str(errors[-1])
        assert unchanged


# -- what is kept -----------------------------------------------------------------------------------------------------


class _Run:
    def __init__(self, rank: int, *, state: str | None = None, **options: Any) -> None:
        self.rank = rank
        self.ddp = DDP(trained.mlp(width=72 if state else 40), bucket_cap_mb=0.002)
        self.optimizer = nc.optim.AdamW(self.ddp.parameters(), 0.01, state=state)
        options = {"warmup_steps": 2, "refresh": "growing", **options}
        self.state = nc.compress_gradients(self.ddp, "sign", momentum=self.optimizer, **options)

    def train(self, first: int, end: int) -> trained.Named:
        trained.train(self.ddp, self.rank, range(first, end), self.optimizer)
        return trained.parameters_of(self.ddp)

    def save(self) -> bytes:
        file = io.BytesIO()
        torch.save([part.state_dict() for part in (self.ddp.module, self.optimizer, self.state)], file)
        return file.getvalue()

    def load(self, data: bytes) -> None:
        loaded = torch.load(io.BytesIO(data))
        for part, state in zip((self.ddp.module, self.optimizer, self.state), loaded, strict=True):
            part.load_state_dict(state)


def _resumed(rank: int, stop: int, state: str | None = None) -> Any:
    first = _Run(rank, state=state)
    first.train(0, stop)
    data = first.save()
    second = _Run(rank, state=state)
    second.load(data)
    held = {key for each in first.optimizer.state.values() for key in each}
    return first.train(stop, 24), second.train(stop, 24), held


@pytest.mark.parametrize("stop", [1, 2, 5, 17, 18])
def test_a_run_that_is_resumed_gives_the_same_bits(stop: int) -> None:
    """In the warm-up, at its end, in the middle, and around a step that refreshes the second moment."""
    for one, other, _ in run(3, _resumed, stop):
        trained.agree([one], [other])


def test_a_momentum_that_is_held_in_rows_travels_too() -> None:
    results = run(2, _resumed, 5, "int8")
    for one, other, held in results:
        assert "exp_avg_rows" in held
        trained.agree([one], [other])
    trained.agree([results[0][0]], [results[1][0]])


def _resumed_without_the_optimizer(rank: int) -> Any:
    first = _Run(rank)
    first.train(0, 5)
    second = _Run(rank)
    second.state.load_state_dict(first.state.state_dict())
    return faults.error_of(lambda: second.train(5, 6))[0]


def test_a_run_that_is_resumed_without_its_optimizer_is_told_so() -> None:
    for error in run(2, _resumed_without_the_optimizer):
        assert isinstance(error, NarrowcastError), error
        assert "state_dict" in str(error)


def _of_gradients(rank: int) -> Any:
    ddp = DDP(trained.mlp(width=40))
    state = nc.compress_gradients(ddp, "int4")
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.01)
    trained.train(ddp, rank, range(3), optimizer)
    momentum = _Run(rank)
    momentum.optimizer.load_state_dict(optimizer.state_dict())
    error, _ = faults.error_of(lambda: momentum.state.load_state_dict(state.state_dict()))
    momentum.state.load_state_dict(state.state_dict(), residuals="drop")
    momentum.train(0, 4)
    return error, momentum.state.state_dict()["momentum"]


def test_residuals_of_gradients_are_none_of_the_momentum() -> None:
    for error, of_momentum in run(2, _of_gradients):
        assert isinstance(error, StateDictError)
        assert "momentum=" in str(error)
        assert of_momentum is True


# -- what is refused --------------------------------------------------------------------------------------------------


def _refusals(rank: int) -> Any:
    ddp = DDP(trained.Given(SHAPES))
    ours = nc.optim.AdamW(ddp.parameters(), 1e-3)
    others = nc.optim.AdamW(trained.Given(SHAPES).parameters(), 1e-3)
    some = nc.optim.AdamW([p for name, p in ddp.named_parameters() if "odd" not in name], 1e-3)
    theirs: Any = torch.optim.AdamW(ddp.parameters(), 1e-3)
    wrong: dict[str, dict[str, Any]] = {
        "narrowcast.optim.AdamW": {"momentum": theirs},
        "does not hold even": {"momentum": others},
        "does not hold odd": {"momentum": some},
        "warmup_steps=0": {"momentum": ours, "warmup_steps": 0},
        "codec='auto'": {"momentum": ours, "codec": "auto"},
        "codec=None": {"momentum": ours, "codec": None},
        "refresh=1": {"momentum": ours, "refresh": 1},
        "refresh=True": {"momentum": ours, "refresh": True},
        "refresh='often'": {"momentum": ours, "refresh": "often"},
        "refresh=8": {"refresh": 8},
        "scaler:": {"scaler": torch.amp.GradScaler("cpu")},
        "scaler=str": {"momentum": ours, "scaler": "yes"},
        "warmup_codec:": {"momentum": ours, "warmup_codec": "int44"},
    }
    errors = {}
    for words, options in wrong.items():
        given = {"codec": "sign", "warmup_steps": 3, **options}
        errors[words] = faults.error_of(lambda given=given: nc.compress_gradients(ddp, **given))[0]
    nc.compress_gradients(ddp, "sign", momentum=ours, warmup_steps=3)  # none of them has left anything behind
    errors["hook already"] = faults.error_of(lambda: nc.compress_gradients(ddp, "sign", momentum=ours, warmup_steps=3))[
        0
    ]
    return errors


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    for errors in run(2, _refusals):
        for words, error in errors.items():
            assert isinstance(error, SpecError | CollectiveError), (words, error)
            assert words in str(error), (words, error)


def _sharded(rank: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(trained.mlp(width=40))
    optimizer = nc.optim.AdamW(model.parameters(), 1e-3)
    return faults.error_of(lambda: nc.compress_gradients(model, "sign", momentum=optimizer, warmup_steps=2))[0]


def test_fsdp2_is_refused_in_words() -> None:
    for error in run(2, _sharded):
        assert isinstance(error, SpecError)
        assert "FSDP2" in str(error)


def _alone(rank: int) -> Any:
    ddp, optimizer, compression = _made(lr=0.01)
    plain = trained.Given(SHAPES)
    theirs = torch.optim.AdamW(plain.parameters(), 0.01, betas=(BETA1, BETA2))
    for step in range(STEPS):
        _step(ddp, optimizer, rank, step)
        theirs.zero_grad()
        plain(trained.given(SHAPES, rank, step)).backward()
        theirs.step()
    return trained.parameters_of(ddp), trained.parameters_of(plain), compression.stats().sent_bytes


def test_one_rank_sends_nothing_and_is_stepped_by_torch() -> None:
    ((ours, theirs, sent),) = run(1, _alone)
    assert sent == 0
    trained.agree([ours], [theirs])


def _bytes(rank: int) -> Any:
    ddp = DDP(trained.Given({"large": (1024, 1024)}))
    optimizer = nc.optim.AdamW(ddp.parameters(), 1e-3)
    compression = nc.compress_gradients(ddp, "sign", momentum=optimizer, warmup_steps=1)
    sent: list[int] = []
    for _ in range(3):
        before = compression.stats().sent_bytes
        trained.backward(ddp, {"large": torch.randn(1024, 1024)})
        optimizer.step()
        sent.append(compression.stats().sent_bytes - before)
    return sent, compression.stats().plain_bytes // 3


def test_a_momentum_in_sign_takes_a_24th_of_fp32() -> None:
    for sent, plain in run(2, _bytes):
        assert sent[1] == sent[2]
        assert sent[1] * 24 <= plain, (sent, plain)
        assert sent[0] * 3.8 <= plain  # the warm-up, in int8
