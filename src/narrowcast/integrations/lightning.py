"""Compressed gradients under Lightning: a callback.

    trainer = Trainer(strategy="ddp", devices=8, callbacks=[CompressGradients("int4")])

It registers its hook after the strategy has wrapped the model. Lightning's own `ddp_comm_hook` works on CUDA only. The
trainer's loggers get `stats()` of the first rank. Checkpoints hold the state of every rank.

A Lightning checkpoint is one file, which the first rank writes. To save, the first rank gathers the residuals of all
ranks. With `error_feedback=True` they take (ranks + 1) times the gradients in fp32, in its main memory and in the file,
which each rank reads to resume; with "owner" they take the gradients once. `residuals=False` neither saves residuals
nor loads them, and so also resumes with another number of ranks.

With one process nothing is sent: the callback says so, logs nothing, and leaves checkpoints alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowcast.distributed import GradientCompression
from narrowcast.distributed.collectives import AnyCodec
from narrowcast.errors import StateDictError
from narrowcast.integrations import one_process, rank_states

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise ImportError(
        "narrowcast.integrations.lightning needs the package lightning. Run: pip install 'narrowcast[lightning]'"
    ) from error


class CompressGradients(Callback):  # type: ignore[misc]
    """Compress the gradients of a `Trainer(strategy="ddp")`.

    - `residuals`: whether checkpoints hold them.
    - `log_every`: log `stats()` after this many steps; by default the trainer's `log_every_n_steps`, and 0 for never.
    - `options`: those of `narrowcast.compress_gradients`.

    `compression` is the `GradientCompression` of this rank, from the start of a fit on.
    """

    def __init__(
        self, codec: AnyCodec | None = "int8", *, residuals: bool = True, log_every: int | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.codec = codec
        self.residuals = residuals
        self.log_every = log_every
        self.options = options
        self.compression: GradientCompression | None = None
        self._sends = False
        self._waiting: Mapping[str, Any] | None = None
        self._logged = -1

    # -- training ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Each fit has its own model, and its own checkpoint to resume from, if any.
        self.compression, self._waiting, self._logged = None, None, -1

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.compression, self._sends = one_process.compress(
            trainer.strategy.model,
            self.codec,
            self.options,
            f"CompressGradients: {type(trainer.strategy).__name__} exchanges no gradients that could be compressed. "
            'Use Trainer(strategy="ddp").',
        )
        if self._waiting is not None:
            self.load_state_dict(self._waiting)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        every = trainer.log_every_n_steps if self.log_every is None else self.log_every
        # Step 0 is the first batches of an accumulation: no gradient has been sent.
        due = every and step and not step % every and step != self._logged
        if not due or self.compression is None or not self._sends or not trainer.is_global_zero:
            return
        self._logged = step  # with accumulation, several batches make a step
        scalars = {f"gradients/{name}": value for name, value in self.compression.stats().scalars().items()}
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=step)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks, on the first rank. Lightning calls it on every rank."""
        if self.compression is None or not self._sends:
            return {}
        return {"ranks": rank_states.gather(self.compression, self.residuals)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self.compression is None:  # the model is not wrapped yet
            self._waiting = state_dict
            return
        if not self._sends:
            return
        if not isinstance(state_dict.get("ranks"), list) or not state_dict["ranks"]:
            raise StateDictError(
                f"state_dict: has {sorted(state_dict)}, and not the 'ranks' that CompressGradients saves. Load a "
                "checkpoint of a run that had this callback."
            )
        rank_states.pick(self.compression, state_dict["ranks"], self.residuals)
        self._waiting = None
