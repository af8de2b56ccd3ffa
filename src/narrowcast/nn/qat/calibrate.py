"""After training: clips from data, and rounding that is learned.

`calibrate_` runs batches through a prepared model, without gradients, while every quantizer of an input passes it on as
it is and an observer looks on; then all clips are set at once. Clips that were set by hand or loaded stay. With
`rounding="learned"` it runs them a second time, with the clips in use, and chooses for each weight the level below or
above so that the layer's own output changes least (nn/rounding/learned.py). If anything fails while observing, an error
in a batch or a layer that no batch reaches, the model is as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowcast.errors import CalibrationError, QuantizeError, SpecError
from narrowcast.nn.qat.clips import scale_of
from narrowcast.nn.qat.fake_quantize import FakeQuantize
from narrowcast.nn.qat.layers import QatEmbedding, Trained
from narrowcast.nn.qat.observers import Observer, make_observer
from narrowcast.nn.quantize import as_module
from narrowcast.nn.rounding.learned import learn_levels
from narrowcast.nn.rounding.moments import InputMoments

Forward = Callable[[nn.Module, Any], Any]


class Rounded(NamedTuple):
    """The squared error of a layer's output, relative to the squared output."""

    name: str
    nearest: float
    learned: float


class Calibration(NamedTuple):
    """What `calibrate_` did."""

    batches: int
    quantizers: list[str]
    """Those whose clips were set."""
    rounded: list[Rounded]
    """Layers whose rounding was learned, with their output errors before and after."""


def calibrate_(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    observer: str | Callable[[], Observer] = "mse",
    batches: int | None = None,
    rounding: str = "nearest",
    steps: int = 300,
    keep: bool = True,
    forward: Forward | None = None,
    progress: bool | None = None,
) -> Calibration:
    """Set the clips of a prepared model's inputs from the batches of `loader`, in place; `batches` of them at most.

    A batch is what the model takes: a tensor, a mapping of keywords, or a tuple whose first element is the input;
    for anything else pass `forward(model, batch)`. `observer` is "minmax", "moving_average", "percentile", "mse", or
    what makes an observer. Clips that were set with `set_clip` or loaded with a state dict stay, and are in use
    meanwhile; `keep=False` chooses all of them anew. A progress bar is drawn on a terminal, unless `progress=False`.
    """
    if rounding not in ("nearest", "learned"):
        raise SpecError(f'rounding={rounding!r}: expected "nearest" or "learned".')
    if isinstance(loader, (Tensor, Mapping)):
        kind = "a tensor, of which every row" if isinstance(loader, Tensor) else "a mapping, of which every key"
        raise CalibrationError(
            f"loader: it is {kind} would be a batch. Give a list of batches: [batch]. The model was left as it was."
        )
    make = partial(make_observer, observer) if isinstance(observer, str) else observer
    make()  # refuses an unknown name before any batch runs
    if rounding == "learned" and iter(loader) is loader:
        raise CalibrationError(
            "loader: it is an iterator, which gives its batches once, and learned rounding needs them twice. Pass a "
            "list or a DataLoader. The model was left as it was."
        )
    quantizers = {
        name: quantizer for name, quantizer in _inputs(as_module(model)).items() if not keep or not quantizer.given
    }
    run = _Run(model, loader, batches, forward or _forward, progress)
    with torch.no_grad(), _evaluating(model):
        _start_weights(model)
        count = _set_clips(quantizers, make, run)
        rounded = _learn_rounding(model, run, steps) if rounding == "learned" else []
    return Calibration(count, list(quantizers), rounded)


class _Run(NamedTuple):
    model: nn.Module
    loader: Iterable[Any]
    limit: int | None
    forward: Forward
    progress: bool | None

    def __call__(self, what: str) -> int:
        """Every batch through the model; how many there were."""
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        count = 0
        for batch in _shown(_first(self.loader, self.limit), what, self._length(), self.progress):
            self.forward(self.model, _moved(batch, device))
            count += 1
        if not count:
            raise CalibrationError(
                "loader: it gave no batch. A generator is used up after one pass: pass a list or a DataLoader. The "
                "model was left as it was."
            )
        return count

    def _length(self) -> int | None:
        known = len(self.loader) if isinstance(self.loader, Sized) else None
        return known if self.limit is None else self.limit if known is None else min(known, self.limit)


def _inputs(model: nn.Module) -> dict[str, FakeQuantize]:
    """The quantizers of inputs, by name: all but those of weights."""
    weights = {id(module.weight_quantizer) for module in model.modules() if isinstance(module, Trained)}
    quantizers = {name: module for name, module in model.named_modules() if isinstance(module, FakeQuantize)}
    if not quantizers:
        raise QuantizeError(
            "model: it has no quantizers to calibrate. Call prepare_qat_(model, weights, activations) first."
        )
    return {name: module for name, module in quantizers.items() if id(module) not in weights}


def _start_weights(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, Trained) and not module.weight_quantizer.is_started:
            module.weight_quantizer.start_from(module.weight)


def _set_clips(quantizers: dict[str, FakeQuantize], make: Callable[[], Observer], run: _Run) -> int:
    before = {name: quantizer.observer for name, quantizer in quantizers.items()}
    try:
        for quantizer in quantizers.values():
            quantizer.observer = make().to(quantizer.alpha.device)
            quantizer.collecting = True
        count = run("observing") if quantizers else 0
        unseen = [name for name, q in quantizers.items() if q.observer is None or not int(q.observer.batches)]
        if unseen:
            raise CalibrationError(
                f"model: no batch reached {', '.join(unseen[:3])}{' and more' if len(unseen) > 3 else ''}, so that "
                "there is nothing to choose a clip from. Pass batches that use every layer, or leave such layers as "
                'they are with prepare_qat_(..., rules={"its name": None}). The model was left as it was.'
            )
    except BaseException:
        for name, quantizer in quantizers.items():
            quantizer.observer, quantizer.collecting = before[name], False
        raise
    for name, quantizer in quantizers.items():
        quantizer.collecting = False
        quantizer.follow_observer()
        if quantizer.alpha.requires_grad:  # which is learned from here on, and needs no observer
            quantizer.observer = before[name]
    return count


def _learn_rounding(model: nn.Module, run: _Run, steps: int) -> list[Rounded]:
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Trained) and not isinstance(module, QatEmbedding)
    }
    moments = {name: InputMoments(module) for name, module in layers.items()}
    hooks = [
        layer.register_forward_pre_hook(partial(_add_input, moments[name]), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        run("measuring inputs")
    finally:
        for hook in hooks:
            hook.remove()
    reached = [name for name in layers if moments[name].count]
    shown = _shown(reached, "rounding", len(reached), run.progress)
    return [_round_layer(name, layers[name], moments[name], steps) for name in shown]


def _add_input(moments: InputMoments, layer: Trained, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    moments.add(layer.quantized_input(args[0] if args else kwargs["input"]))


def _round_layer(name: str, layer: Trained, moments: InputMoments, steps: int) -> Rounded:
    """Write learned levels into a layer's weight.

    A layer that normalizes its weight no longer does, since its levels would move with the deviation; its clips are
    chosen anew.
    """
    quantizer, weight = layer.weight_quantizer, layer.weight.detach()
    if quantizer.normalize is not None:
        weight.copy_(quantizer.target(weight))
        quantizer.normalize = None
        quantizer.start_from(weight)
    scale = scale_of(quantizer.clip, quantizer.top).expand(len(weight))
    learned = learn_levels(weight, scale, quantizer.levels, moments.mean(), steps)
    weight.copy_(learned.weight)
    return Rounded(name, learned.nearest, learned.learned)


# -- batches -------------------------------------------------------------------------------------------------------


def _forward(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    return tuple(_moved(value, device) for value in batch) if isinstance(batch, (tuple, list)) else batch


def _first(loader: Iterable[Any], limit: int | None) -> Iterator[Any]:
    for place, batch in enumerate(loader):
        if limit is not None and place >= limit:
            return
        yield batch


def _shown(items: Iterable[Any], what: str, total: int | None, progress: bool | None) -> Iterable[Any]:
    if progress is False or not sys.stderr.isatty():
        return items
    from rich.console import Console
    from rich.progress import track

    return track(items, what, total, console=Console(stderr=True), transient=True)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module in model.modules():
            module.training = modes.get(module, False)
