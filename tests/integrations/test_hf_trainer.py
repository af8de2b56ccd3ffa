"""The Trainer of transformers on two CPU ranks, with narrowcast's callback, on a small Llama made on the spot."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from trainers import error_of, same, weights

from narrowcast.errors import MissingFileError, ModelKindError

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")

STEPS = 4


def trainer(folder: Path, steps: int = STEPS, resumed: Path | None = None, **options: Any) -> Any:
    """A Trainer with the callback; the callback is its attribute `compress`."""
    from small_llama import llama
    from transformers import Trainer, TrainingArguments

    from narrowcast.integrations.hf_trainer import CompressGradients

    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_steps=2,
        logging_steps=2,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        seed=3,
        resume_from_checkpoint=None if resumed is None else str(resumed),
    )
    tokens = torch.randint(1, 96, (32, 16), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    made = Trainer(llama(), args, train_dataset=data)
    made.compress = CompressGradients(made, "int4:stochastic=true", **options)
    made.add_callback(made.compress)
    return made


def train(rank: int, path: str) -> dict[str, Any]:
    import torch.distributed as dist

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # the group is there already, but Accelerate looks for it
    folder, found = Path(path), {}
    whole = trainer(folder / "whole")
    whole.train()
    found["whole"] = weights(whole.model)
    stats = whole.compress.compression.stats()
    found["stats"] = stats.steps, stats.ratio
    found["log"] = [entry for entry in whole.state.log_history if "gradients/ratio" in entry]

    part = trainer(folder / "part", steps=2)
    part.train()
    resumed = trainer(folder / "part")
    resumed.train(resume_from_checkpoint=True)
    found["resumed"] = weights(resumed.model)

    dist.barrier()
    if rank == 0:
        shutil.move(folder / "part" / "checkpoint-2", folder / "elsewhere")
    dist.barrier()
    lost = trainer(folder / "lost")
    found["lost"] = error_of(lambda: lost.train(resume_from_checkpoint=str(folder / "elsewhere")))
    dist.barrier()
    told = trainer(folder / "told", resumed=folder / "elsewhere", log_every=0)
    told.train(resume_from_checkpoint=str(folder / "elsewhere"))
    found["told"] = weights(told.model)
    found["silent"] = [entry for entry in told.state.log_history[2:] if "gradients/ratio" in entry]
    whole.model_wrapped, whole.compress._compressed = whole.model, None
    found["bare"] = error_of(lambda: whole.compress.on_train_begin(whole.args, whole.state, whole.control))
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.run(2, train, str(tmp_path_factory.mktemp("trainer")), timeout=200.0)


def test_the_trainer_compresses_and_ranks_end_with_the_same_bits(trained: list[dict[str, Any]]) -> None:
    assert same(trained[0]["whole"], trained[1]["whole"])
    steps, ratio = trained[0]["stats"]
    assert steps == STEPS
    assert ratio > 5


def test_training_that_resumes_equals_training_that_was_not_stopped(trained: list[dict[str, Any]]) -> None:
    for found in trained:
        assert same(found["resumed"], found["whole"])


def test_a_checkpoint_that_was_moved_is_asked_for_and_taken_where_it_is(trained: list[dict[str, Any]]) -> None:
    for found in trained:
        assert isinstance(found["lost"], MissingFileError)
        assert "checkpoint-2 is not the checkpoint that training resumes from at step 2" in str(found["lost"])
        assert "TrainingArguments(..., resume_from_checkpoint=folder)" in str(found["lost"])
        assert same(found["told"], found["whole"])


def test_stats_are_logged_as_often_as_the_trainer_logs_or_never(trained: list[dict[str, Any]]) -> None:
    assert [entry["step"] for entry in trained[0]["log"]] == [2, 4]
    assert trained[0]["log"][0]["gradients/saved_bytes"] > 0
    assert trained[0]["silent"] == []


def test_a_model_that_nothing_wrapped_is_refused(trained: list[dict[str, Any]]) -> None:
    assert isinstance(trained[0]["bare"], ModelKindError)
    assert "LlamaForCausalLM that exchanges no gradients" in str(trained[0]["bare"])
    assert "torchrun --nproc-per-node 2" in str(trained[0]["bare"])
