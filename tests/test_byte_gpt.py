"""The byte-level model and its text: what benches and the demo build on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from narrowcast.byte_gpt import ByteGPT, GPTConfig, batches, loss_of, stdlib_text
from narrowcast.errors import MissingFileError, ShapeError

SMALL = GPTConfig(layers=2, width=32, heads=2, context=16)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine would take most of the time here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def parameters_of(config: GPTConfig) -> int:
    return sum(p.numel() for p in ByteGPT(config).parameters())


def random_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(0))


# -- the model ---------------------------------------------------------------------------------------------------------


def test_the_benchs_model_has_about_ten_million_parameters_and_the_default_well_under_one() -> None:
    assert 10e6 < parameters_of(GPTConfig(layers=6, width=384, heads=6, context=64)) < 11e6
    assert 0.7e6 < parameters_of(GPTConfig()) < 0.9e6


def test_an_untrained_model_knows_nothing() -> None:
    # Logits start small, so the loss is that of 256 equal chances; 0.1 is over 5 times the logits' own variance.
    tokens = random_tokens(8, 17)
    assert loss_of(ByteGPT(SMALL)(tokens[:, :-1]), tokens[:, 1:]).item() == pytest.approx(math.log(256), abs=0.1)


def test_a_position_sees_what_came_before_and_nothing_after() -> None:
    model, tokens = ByteGPT(SMALL), random_tokens(1, 16)
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert all(not torch.equal(before[:, t], after[:, t]) for t in range(9, 16))


def test_the_order_of_bytes_matters() -> None:
    model = ByteGPT(GPTConfig(layers=1, width=32, heads=2, context=16))  # of one layer, as two see it without positions
    forwards, swapped = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 1, 3]])
    assert not torch.allclose(model(forwards)[:, -1], model(swapped)[:, -1])


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    first, again, other = (ByteGPT(SMALL, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["symbols.weight"], other["symbols.weight"])


def test_it_learns_a_text_by_heart_and_writes_it() -> None:
    text = torch.tensor(list(b"def double(x): return x + x\n" * 4), dtype=torch.uint8)
    model = ByteGPT(GPTConfig(layers=1, width=32, heads=2, context=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, targets in itertools.islice(batches(text, 16, 8, seed=0), 150):
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.generate(b"def double(", 16, temperature=0) == b"x): return x + x"


def test_writing_depends_on_the_seed_alone() -> None:
    model = ByteGPT(SMALL)
    first, again, other = (model.generate(b"a", 20, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len(model.generate(b"", 40)) == 40  # past the context, and after nothing


@pytest.mark.parametrize("shape", [(16,), (1, 17)])
def test_tokens_of_a_wrong_shape_are_named_with_the_cut_that_fits(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"tokens: .*context of 16; this is \[(?:16|1, 17)\].*tokens\[:, -16:\]"):
        ByteGPT(SMALL)(random_tokens(*shape))


@pytest.mark.parametrize("wrong", [{"heads": 3}, {"layers": 0}, {"context": 0}])
def test_a_shape_that_cannot_be_is_refused_with_one_that_can(wrong: dict[str, int]) -> None:
    with pytest.raises(ShapeError, match=r"heads must divide width.*For example: GPTConfig\("):
        GPTConfig(**wrong)


# -- the text ----------------------------------------------------------------------------------------------------------


def test_the_text_is_python_in_two_parts_that_share_no_file() -> None:
    train, held_out = stdlib_text(), stdlib_text(held_out=True)
    assert train.dtype == torch.uint8
    assert len(train) > 5e6
    assert 0.03 < len(held_out) / len(train) < 0.3
    both = bytes(train.tolist()), bytes(held_out.tolist())
    for line in (b"class JSONDecoder(", b"class Fraction(numbers.Rational)", b"class TarFile("):
        assert sorted(line in part for part in both) == [False, True]


def test_the_text_is_the_same_each_time() -> None:
    assert torch.equal(stdlib_text(held_out=True), stdlib_text(held_out=True))


def test_a_python_without_source_is_named_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(MissingFileError, match=r"holds no Python source: .*Use a Python that has it"):
        stdlib_text()


def test_targets_are_the_bytes_that_follow() -> None:
    inputs, targets = next(batches(torch.arange(256, dtype=torch.uint8), 8, 4, seed=0))
    assert inputs.shape == targets.shape == (4, 8)
    assert inputs.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)


def test_windows_reach_both_ends_of_the_text() -> None:
    drawn = [inputs.min().item() for inputs, _ in itertools.islice(batches(torch.arange(10), 8, 1, seed=0), 40)]
    assert set(drawn) == {0, 1}


def test_ranks_and_seeds_draw_different_windows_and_the_same_ones_again() -> None:
    text = torch.arange(10_000)
    kinds = [(0, 0), (0, 1), (1, 0), (1, 1)]
    drawn = [next(batches(text, 8, 64, seed=seed, rank=rank))[0] for seed, rank in [*kinds, (0, 0)]]
    assert torch.equal(drawn[0], drawn[-1])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn[:4], 2))


def test_a_text_shorter_than_the_context_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"text: .*longer than the context of 8, and has 8 bytes"):
        next(batches(torch.arange(8), 8, 1, seed=0))
