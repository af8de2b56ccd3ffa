"""Lightning's own Trainer with strategy="ddp" on two CPU ranks, with narrowcast's callback."""

from __future__ import annotations

import csv
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import Tensor, nn
from trainers import error_of, same, weights

from narrowcast.errors import ModelKindError, StateDictError

# Looked for, not imported: that takes seconds, and the ranks do it.
MISSING = [name for name in ("lightning", "tensorboard") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}")

EPOCHS, BATCHES = 3, 2


def network() -> Any:
    from lightning.pytorch import LightningModule

    class Network(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return (self.layers(batch[0]) - batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 0.01)

    return Network()


def fit(
    folder: Path,
    epochs: int,
    resumed: Path | None = None,
    logger: Any = False,
    devices: int = 2,
    accumulate: int = 1,
    **options: Any,
) -> Any:
    """A trainer that has trained: its model and callback are at hand."""
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from narrowcast.integrations.lightning import CompressGradients

    data = torch.randn(2 * BATCHES * 4, 32, generator=torch.Generator().manual_seed(1))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(
        strategy="ddp" if devices > 1 else "auto",
        accelerator="cpu",
        devices=devices,
        accumulate_grad_batches=accumulate,
        max_epochs=epochs,
        logger=logger,
        log_every_n_steps=4,
        default_root_dir=folder,
        callbacks=[CompressGradients("int4:stochastic=true", **options)],
        **quiet,
    )
    trainer.fit(network(), DataLoader(TensorDataset(data), batch_size=4), ckpt_path=resumed)
    return trainer


def train(rank: int, path: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # Lightning's: few workers, a short epoch
    from lightning.pytorch import Trainer
    from lightning.pytorch.loggers import CSVLogger

    from narrowcast.integrations.lightning import CompressGradients

    folder, found = Path(path), {}
    # In one go; then stopped after an epoch, and resumed.
    whole = fit(folder, EPOCHS, logger=CSVLogger(folder, "log", version=0))
    found["whole"] = weights(whole.model)
    compression = whole.callbacks[0].compression
    stats = compression.stats()
    found["ratio"], found["steps"], found["residual"] = stats.ratio, stats.steps, stats.residual_norm

    if rank == 0:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(folder / "events")) as writer:
            compression.log(writer)
        found["scalars"] = stats.scalars()

    fit(folder, EPOCHS, logger=CSVLogger(folder, "log", version=1), accumulate=2, log_every=1)

    part = fit(folder, 1)
    part.save_checkpoint(folder / "part.ckpt")
    found["resumed"] = weights(fit(folder, EPOCHS, resumed=folder / "part.ckpt").model)
    part.callbacks[0].residuals = False
    part.save_checkpoint(folder / "small.ckpt")
    small = fit(folder, 2, resumed=folder / "small.ckpt", residuals=False)
    found["small steps"] = small.callbacks[0].compression.step

    # Another number of ranks.
    callback = whole.callbacks[0]
    alone = {"ranks": [compression.state_dict()]}
    found["other ranks"] = error_of(lambda: callback.load_state_dict(alone))
    found["strange"] = error_of(lambda: callback.load_state_dict({"epoch": 3}))
    callback.residuals = False
    callback.load_state_dict(alone)
    found["step without residuals"] = compression.step

    single = Trainer(accelerator="cpu", devices=1, logger=False, callbacks=[CompressGradients()], max_epochs=1)
    found["single"] = error_of(lambda: callback.on_fit_start(single, None))
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("lightning")
    return folder, ranks.run(2, train, str(folder), timeout=200.0)


Trained = tuple[Path, list[dict[str, Any]]]


def test_the_callback_compresses_and_ranks_end_with_the_same_bits(trained: Trained) -> None:
    first, second = trained[1]
    assert same(first["whole"], second["whole"])
    assert first["steps"] == EPOCHS * BATCHES
    # 4,096 weights at 4.5 bits or so, 96 biases at 32, and the header that ranks agree on.
    assert 3 < first["ratio"] < 8
    assert first["residual"] > 0


def test_a_run_that_is_resumed_from_a_checkpoint_equals_one_that_was_not_stopped(trained: Trained) -> None:
    for found in trained[1]:
        assert same(found["resumed"], found["whole"])


def test_a_checkpoint_holds_the_residuals_of_every_rank(trained: Trained) -> None:
    saved = torch.load(trained[0] / "part.ckpt", weights_only=True)["callbacks"]["CompressGradients"]["ranks"]
    assert [state["rank"] for state in saved] == [0, 1]
    assert set(saved[0]["sender"]) == {"layers.0.weight", "layers.2.weight"}
    assert not torch.equal(saved[0]["sender"]["layers.0.weight"], saved[1]["sender"]["layers.0.weight"])


def test_residuals_can_be_left_out_of_checkpoints(trained: Trained) -> None:
    saved = torch.load(trained[0] / "small.ckpt", weights_only=True)["callbacks"]["CompressGradients"]["ranks"]
    assert all(not state["sender"] and not state["owner"] for state in saved)
    assert [found["small steps"] for found in trained[1]] == [2 * BATCHES] * 2


def test_the_states_of_another_number_of_ranks_are_refused_or_taken_without_residuals(trained: Trained) -> None:
    for found in trained[1]:
        assert isinstance(found["other ranks"], StateDictError)
        assert "of 1 ranks, and this run has 2" in str(found["other ranks"])
        assert "pass residuals=False" in str(found["other ranks"])
        assert found["step without residuals"] == EPOCHS * BATCHES


def test_a_state_that_is_not_the_callbacks_is_refused(trained: Trained) -> None:
    error = trained[1][0]["strange"]
    assert isinstance(error, StateDictError)
    assert "has ['epoch'], and not the 'ranks'" in str(error)


def test_a_strategy_without_ddp_is_refused(trained: Trained) -> None:
    error = trained[1][0]["single"]
    assert isinstance(error, ModelKindError)
    assert "SingleDeviceStrategy exchanges no gradients" in str(error)
    assert 'Trainer(strategy="ddp")' in str(error)


def test_stats_are_logged_as_often_as_the_trainer_logs(trained: Trained) -> None:
    with open(trained[0] / "log" / "version_0" / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row.get("gradients/ratio")]
    assert [int(row["step"]) for row in rows] == [4]
    assert float(rows[0]["gradients/saved_bytes"]) > 0
    assert float(rows[0]["gradients/residual_norm"]) > 0


def test_no_row_of_the_log_is_of_a_step_in_which_nothing_was_sent(trained: Trained) -> None:
    with open(trained[0] / "log" / "version_1" / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row.get("gradients/ratio")]
    assert [int(row["step"]) for row in rows] == [1, 2, 3]  # two batches make a step
    assert all(float(row["gradients/sent_bytes"]) > 0 for row in rows)


def test_one_process_trains_and_says_once_that_nothing_is_sent(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit(tmp_path, 2, logger=CSVLogger(tmp_path, "log", version=0), devices=1, log_every=1)
        trainer.save_checkpoint(tmp_path / "alone.ckpt")
        fit(tmp_path, 3, resumed=tmp_path / "alone.ckpt", devices=1)
    said = [str(warning.message) for warning in caught if "narrowcast" in str(warning.message)]
    assert len(said) == 2  # once for each fit
    assert "one process, so no gradient is sent" in said[0]
    log = tmp_path / "log" / "version_0" / "metrics.csv"
    assert not log.exists() or "gradients/" not in log.read_text()


def test_stats_are_written_for_tensorboard(trained: Trained) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained[0] / "events"))
    events.Reload()
    written = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    meant = trained[1][0]["scalars"]  # TensorBoard keeps them in fp32
    assert written == {f"gradients/{name}": [(6, float(torch.tensor(value)))] for name, value in meant.items()}
    assert {"gradients/ratio", "gradients/hidden_seconds", "gradients/sqnr/bucket 0"} <= set(written)
