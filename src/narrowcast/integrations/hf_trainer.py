"""Compressed gradients under the Trainer of Hugging Face's transformers: a callback.

    trainer = Trainer(model, args, train_dataset=data)
    trainer.add_callback(CompressGradients(trainer, "int4"))

It takes the trainer, because callbacks get the bare model, and gradients are exchanged by the wrapper that Accelerate
puts around it. Each rank writes its state into the checkpoint's folder, beside the trainer's random states, and reads
it when training resumes. `stats()` goes to the trainer's log, in rows of its own: the trainer's rows are what they are
without the callback. With one process nothing is sent, and the callback only says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from narrowcast.distributed import GradientCompression
from narrowcast.distributed.collectives import AnyCodec
from narrowcast.errors import MissingFileError
from narrowcast.integrations import one_process, rank_states

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "narrowcast.integrations.hf_trainer needs transformers 5 or later. Run: pip install 'narrowcast[hf]'"
    ) from error


class CompressGradients(TrainerCallback):  # type: ignore[misc]
    """Compress the gradients of a `Trainer` with several processes.

    - `residuals`: whether checkpoints hold them. False also resumes from a checkpoint of another number of ranks, or
      of a run without compression.
    - `log_every`: log `stats()` after this many steps; by default whenever the trainer logs the loss, and 0 for never.
    - `options`: those of `narrowcast.compress_gradients`.

    `compression` is the `GradientCompression` of this rank, from the start of training on.
    """

    def __init__(
        self,
        trainer: Trainer,
        codec: AnyCodec | None = "int8",
        *,
        residuals: bool = True,
        log_every: int | None = None,
        **options: Any,
    ) -> None:
        self.trainer = trainer
        self.codec = codec
        self.residuals = residuals
        self.log_every = log_every
        self.options = options
        self.compression: GradientCompression | None = None
        self._compressed: nn.Module | None = None
        self._sends = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **unused: Any
    ) -> None:
        model = self.trainer.model_wrapped
        if model is not self._compressed:  # the trainer wraps the model once, however often it trains
            self.compression, self._sends = one_process.compress(
                model,
                self.codec,
                self.options,
                f"CompressGradients: the trainer's model is a {type(model).__name__} that exchanges no gradients, in a "
                "run of several processes. Let the trainer wrap it: leave out options that turn DDP off.",
            )
            self._compressed = model
        if state.global_step and self.compression is not None and self._sends:
            self._resume(self.compression, args, state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **unused: Any) -> None:
        if self.log_every and not state.global_step % self.log_every:
            should_log = control.should_log
            self._log()
            control.should_log = should_log  # logging resets it, and the trainer would not log the loss of this step

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **unused: Any,
    ) -> None:
        if self.log_every is None and logs is not None and "loss" in logs:
            self._log()

    def _log(self) -> None:
        if self.compression is not None and self._sends:
            scalars = self.compression.stats().scalars()
            # Not the method of a subclass: those add figures of their own to a row, or expect the loss in it.
            Trainer.log(self.trainer, {f"gradients/{name}": value for name, value in scalars.items()})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **unused: Any) -> None:
        # Trials of a hyperparameter search are never resumed, and save elsewhere.
        resumed = not (args.save_only_model or state.is_hyper_param_search)
        if self.compression is not None and self._sends and resumed:
            rank_states.save(self.compression, _folder(args, state), self.residuals)

    def _resume(self, compression: GradientCompression, args: TrainingArguments, state: TrainerState) -> None:
        """The trainer does not tell callbacks which folder it resumes from: look where it saves, and compare."""
        given = args.resume_from_checkpoint
        folder = Path(given) if isinstance(given, str) and Path(given).is_dir() else _folder(args, state)
        saved = folder / "trainer_state.json"
        old = TrainerState.load_from_json(str(saved)) if saved.is_file() else None
        if old is None or (old.global_step, old.log_history) != (state.global_step, state.log_history):
            raise MissingFileError(
                f"{folder} is not the checkpoint that training resumes from at step {state.global_step}, so its "
                "gradient state cannot be found. Pass the folder to both: "
                "TrainingArguments(..., resume_from_checkpoint=folder), trainer.train(resume_from_checkpoint=folder)."
            )
        rank_states.load(compression, folder, self.residuals)


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
