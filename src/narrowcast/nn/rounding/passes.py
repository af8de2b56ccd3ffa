"""One batch through a model, or up to one of its blocks; what goes wrong names the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from narrowcast.errors import CalibrationError
from narrowcast.nn.rounding.batches import UNCHANGED, run_batch


class _StopHere(Exception):
    """Ends a forward pass: what runs behind is not needed."""


def run_up_to(model: nn.Module, batch: Any, number: int, stop_at: nn.Module | None = None) -> Any:
    """One batch through the model, up to the call of `stop_at`; what the model gives, if it comes that far."""
    try:
        with _stopping(stop_at):
            return run_batch(model, batch)
    except _StopHere:
        return None
    except CalibrationError:
        raise
    except Exception as error:
        raise CalibrationError(
            f"data: the model cannot run batch {number}: {type(error).__name__}: {error}. A batch is what the model "
            f"takes: a tensor, a mapping of keywords, or a tuple whose first element is the input. {UNCHANGED}"
        ) from error


@contextmanager
def _stopping(module: nn.Module | None) -> Iterator[None]:
    if module is None:
        yield
        return

    def stop(*_: Any) -> None:
        raise _StopHere

    hook = module.register_forward_pre_hook(stop)
    try:
        yield
    finally:
        hook.remove()
