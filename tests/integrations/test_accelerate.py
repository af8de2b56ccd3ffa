"""Accelerate's own Accelerator on two CPU ranks: a prepared model, accumulation, save_state and load_state."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import Tensor, nn
from trainers import error_of, same, weights

import narrowcast as nc
from narrowcast.errors import MissingFileError, ModelKindError, StateDictError

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")

CODEC = "int4:stochastic=true"


class Run:
    """A model with its accelerator and optimizer, and batches that are the same in every run."""

    def __init__(self, accumulate: int = 1) -> None:
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def compress(self, **options: Any) -> nc.GradientCompression:
        from narrowcast.integrations.accelerate import compress_gradients

        return compress_gradients(self.accelerator, self.model, CODEC, seed=7, **options)

    def train(self, start: int, stop: int) -> list[Tensor]:
        for step in range(start, stop):
            seed = step * 2 + self.accelerator.process_index
            batch = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward((self.model(batch) - batch).square().mean())
                self.optimizer.step()
                self.optimizer.zero_grad()
        return weights(self.model)


def train(rank: int, folder: str) -> dict[str, Any]:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the group is there already, but Accelerate looks for it
    found: dict[str, Any] = {}
    run = Run()
    state = run.compress()
    found["whole"] = run.train(0, 6)
    found["ratio"] = state.stats().ratio

    run = Run()
    nc.compress_gradients(run.model, CODEC, seed=7)  # the plain call does it, too
    found["plainly"] = run.train(0, 6)

    part = Run()
    part.compress()
    part.train(0, 3)
    part.accelerator.save_state(f"{folder}/part")
    part.accelerator.wait_for_everyone()
    resumed = Run()
    resumed.compress()
    resumed.accelerator.load_state(f"{folder}/part")
    found["resumed"] = resumed.train(3, 6)

    run = Run(accumulate=2)
    state = run.compress()
    run.train(0, 6)
    found["accumulated"] = state.step
    found |= refusals(rank, folder)
    return found


def refusals(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    plain = Run()
    plain.accelerator.save_state(f"{folder}/plain")
    plain.accelerator.wait_for_everyone()
    late = Run()
    state = late.compress()
    found["missing"] = error_of(lambda: late.accelerator.load_state(f"{folder}/plain"))
    part = Path(folder) / "part" / f"narrowcast_gradients_0_rank_{rank}.pt"
    saved = torch.load(part, weights_only=True)
    found["saved"] = saved["rank"], sorted(saved["sender"])
    other = Path(folder) / "plain" / part.name
    torch.save({**saved, "ranks": 4}, other)
    found["other ranks"] = error_of(lambda: late.accelerator.load_state(f"{folder}/plain"))
    other.unlink()

    easy = Run()
    state = easy.compress(residuals=False)
    easy.accelerator.load_state(f"{folder}/plain")
    found["afresh"] = state.step
    easy.accelerator.load_state(f"{folder}/part")
    found["without residuals"] = state.step, state.state_dict()["sender"]

    wrong = Run()
    wrong.accelerator.register_for_checkpointing(nc.compress_gradients(wrong.model, CODEC))
    wrong.train(0, 1)
    wrong.accelerator.save_state(f"{folder}/wrong")
    wrong.accelerator.wait_for_everyone()
    found["first rank's"] = error_of(lambda: wrong.accelerator.load_state(f"{folder}/wrong"))
    found["bare"] = error_of(lambda: nc.integrations.accelerate.compress_gradients(easy.accelerator, nn.Linear(2, 2)))
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(2, train, str(tmp_path_factory.mktemp("accelerate")), timeout=200.0)


def test_a_prepared_model_is_compressed_and_ranks_end_with_the_same_bits(trained: list[dict[str, Any]]) -> None:
    assert same(trained[0]["whole"], trained[1]["whole"])
    assert same(trained[0]["whole"], trained[0]["plainly"])
    assert trained[0]["ratio"] > 3


def test_load_state_goes_on_as_if_never_stopped(trained: list[dict[str, Any]]) -> None:
    for found in trained:
        assert same(found["resumed"], found["whole"])


def test_every_rank_saves_its_own_residuals(trained: list[dict[str, Any]]) -> None:
    names = ["0.weight", "2.weight"]
    assert [found["saved"] for found in trained] == [(0, names), (1, names)]


def test_accelerate_alone_would_hand_the_first_ranks_residuals_to_all_and_they_are_refused(
    trained: list[dict[str, Any]],
) -> None:
    assert trained[0]["first rank's"] is None
    assert isinstance(trained[1]["first rank's"], StateDictError)
    assert "taken by rank 0 of 2, loaded by rank 1 of 2" in str(trained[1]["first rank's"])


def test_accumulated_gradients_are_exchanged_once(trained: list[dict[str, Any]]) -> None:
    assert [found["accumulated"] for found in trained] == [3, 3]


def test_a_checkpoint_without_gradient_state_is_refused_or_started_from_afresh(trained: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(trained):
        assert isinstance(found["missing"], MissingFileError)
        assert f"no gradient state of rank {rank}" in str(found["missing"])
        assert "pass residuals=False" in str(found["missing"])
        assert found["afresh"] == 0


def test_a_checkpoint_of_other_ranks_is_refused_or_taken_without_residuals(trained: list[dict[str, Any]]) -> None:
    for found in trained:
        assert isinstance(found["other ranks"], StateDictError)
        assert "of 4 ranks, and this run has 2" in str(found["other ranks"])
        assert found["without residuals"] == (3, {})


def test_a_model_that_is_not_prepared_is_refused(trained: list[dict[str, Any]]) -> None:
    assert isinstance(trained[0]["bare"], ModelKindError)
    assert "Linear exchanges no gradients. Pass what accelerator.prepare(model) returns" in str(trained[0]["bare"])


def test_one_process_trains_and_says_once_that_nothing_is_sent(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from narrowcast.integrations.accelerate import compress_gradients

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(8, 8))
    with pytest.warns(UserWarning, match="one process, so no gradient is sent"):
        compression = compress_gradients(accelerator, model, CODEC)
    accelerator.backward(model(torch.randn(2, 8)).square().mean())
    accelerator.save_state(str(tmp_path))
    accelerator.load_state(str(tmp_path))
    assert compression.stats().sent_bytes == 0
    assert not [*tmp_path.glob("narrowcast_gradients*")]
    with pytest.raises(nc.errors.SpecError, match="does not exist"):
        compress_gradients(accelerator, model, "int77")
