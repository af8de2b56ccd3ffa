"""The Trainer of transformers on two CPU ranks, with narrowcast's callback, on a small Llama made on the spot."""

from __future__ import annotations

import os
import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from trainers import error_of, same, weights

from narrowcast.errors import MissingFileError, ModelKindError, SpecError

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")

STEPS = 4


def trainer(folder: Path, steps: int = STEPS, resumed: Path | None = None, **options: Any) -> Any:
    """A Trainer with the callback; the callback is its attribute `compress`."""
    from transformers import Trainer, TrainingArguments

    from narrowcast.integrations.hf_trainer import CompressGradients
    from small_llama import llama

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


def histories(folder: Path) -> list[list[dict[str, Any]]]:
    """The logs of a training without the callback and with it. Gradients travel exactly, so losses can be compared."""
    logs = []
    for codec in (None, "raw"):
        made = trainer(folder / str(codec))
        made.remove_callback(made.compress)
        if codec:
            from narrowcast.integrations.hf_trainer import CompressGradients

            made.add_callback(CompressGradients(made, codec))
        made.train()
        logs.append(made.state.log_history)
    return logs


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
    found["without"] = histories(folder / "without")

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


def test_the_trainers_own_log_is_what_it_is_without_the_callback(trained: list[dict[str, Any]]) -> None:
    plain, compressed = trained[0]["without"]
    ours = [entry for entry in compressed if any(name.startswith("gradients/") for name in entry)]
    assert [entry["step"] for entry in ours] == [2, 4]
    assert not [entry for entry in ours if "loss" in entry]
    theirs = [timeless(entry) for entry in compressed if entry not in ours]
    assert [entry["step"] for entry in theirs if "loss" in entry] == [2, 4]
    assert "train_loss" in theirs[-1]
    assert theirs == [timeless(entry) for entry in plain]


def timeless(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not name.endswith(("_runtime", "_per_second"))}


def test_with_one_process_the_callback_says_once_that_nothing_is_sent(tmp_path: Path) -> None:
    made = trainer(tmp_path, steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.train()
        made.train()
    said = [str(warning.message) for warning in caught if "narrowcast" in str(warning.message)]
    assert len(said) == 1
    assert "one process, so no gradient is sent" in said[0]
    assert not [name for entry in made.state.log_history for name in entry if name.startswith("gradients/")]
    assert made.compress.compression.stats().sent_bytes == 0
    with pytest.raises(SpecError, match="does not exist"):
        trainer_with(tmp_path, "int77").train()


def trainer_with(folder: Path, codec: str) -> Any:
    made = trainer(folder, steps=1)
    made.compress.codec = codec
    made.compress._compressed = None
    return made


def test_a_model_that_nothing_wrapped_is_refused(trained: list[dict[str, Any]]) -> None:
    assert isinstance(trained[0]["bare"], ModelKindError)
    assert "LlamaForCausalLM that exchanges no gradients" in str(trained[0]["bare"])
    assert "in a run of several processes" in str(trained[0]["bare"])
