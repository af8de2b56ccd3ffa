"""Compressed gradients under the Trainer of Hugging Face's transformers: a callback.

    trainer = Trainer(model, args, train_dataset=data)
    trainer.add_callback(CompressGradients(trainer, "int4"))

It takes the trainer, because callbacks get the bare model, and gradients are exchanged by the wrapper that Accelerate
puts around it. Each rank writes its state into the checkpoint's folder, beside the trainer's random states, and reads
it when training resumes. `stats()` goes to the trainer's log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from narrowcast import compress_gradients
from narrowcast.distributed import GradientCompression
from narrowcast.distributed.collectives import AnyCodec
from narrowcast.errors import MissingFileError, ModelKindError
from narrowcast.integrations import rank_states

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
    - `log_every`: log `stats()` after this many steps; by default whenever the trainer logs, and 0 for never.
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

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **unused: Any
    ) -> None:
        model = self.trainer.model_wrapped
        if model is not self._compressed:  # the trainer wraps the model once, however often it trains
            try:
                self.compression = compress_gradients(model, self.codec, **self.options)
            except ModelKindError as error:
                raise ModelKindError(
                    f"CompressGradients: the trainer's model is a {type(model).__name__} that exchanges no gradients. "
                    "Run the script with at least two processes (torchrun --nproc-per-node 2 script.py), or leave the "
                    "callback out where there is one."
                ) from error
            self._compressed = model
        if state.global_step and self.compression is not None:
            self._resume(self.compression, args, state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **unused: Any) -> None:
        due = (
            control.should_log if self.log_every is None else self.log_every and not state.global_step % self.log_every
        )
        if due and self.compression is not None:
            scalars = self.compression.stats().scalars()
            self.trainer.log({f"gradients/{name}": value for name, value in scalars.items()})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **unused: Any) -> None:
        # Trials of a hyperparameter search are never resumed, and save elsewhere.
        if self.compression is not None and not (args.save_only_model or state.is_hyper_param_search):
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
