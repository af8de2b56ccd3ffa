"""Steps of a generation: one token of each sequence after the other.

`Eager` computes a step when it is asked for. `Graph` captures one step as a CUDA graph: tokens and positions stay on
the device, the choice of the next token is a part of the graph, and a step costs the host one launch. The host reads
tokens one step behind the device, so the device never waits for it.
"""

from __future__ import annotations

import traceback
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from narrowcast.errors import CaptureError
from narrowcast.generate.cache import Cache
from narrowcast.generate.decoder import Decoder
from narrowcast.generate.kernels import Kernels
from narrowcast.generate.layers import EncodedLayers
from narrowcast.generate.sampling import Sampling
from narrowcast.kernels.early import weights_written_long_ago


class Choice(NamedTuple):
    """What makes a token out of the tokens so far."""

    decoder: Decoder
    cache: Cache
    kernels: Kernels
    sampling: Sampling
    generator: torch.Generator
    whole: EncodedLayers | None = None
    """All layers in one call, on a CPU."""

    def next(self, tokens: Tensor, at: Tensor, longest: int) -> Tensor:
        """The tokens after `tokens`, at the positions `at`. After NONE, with which a graph goes on, come any."""
        with weights_written_long_ago():
            logits = self.decoder.advance(tokens.clamp_min(0), at, self.cache, longest, self.kernels, self.whole)
        return self.sampling.choose(logits, self.generator)


class Steps(Protocol):
    """`ahead`: how many steps may be begun before the tokens of the oldest one are read."""

    ahead: int

    def begin(self) -> None:
        """Start a step."""

    def read(self) -> list[int]:
        """Wait for the oldest step that was not read yet: its tokens."""

    def close(self) -> None:
        """Wait for what is under way."""


class Eager:
    """Every operation is launched by itself, and attention sees no more positions than there are."""

    ahead = 0

    def __init__(self, choice: Choice, tokens: Tensor, at: Tensor, longest: int) -> None:
        self._choice, self._tokens, self._at, self._longest = choice, tokens, at, longest

    def begin(self) -> None:
        self._longest += 1
        with torch.inference_mode():
            self._tokens = self._choice.next(self._tokens, self._at, self._longest)
            self._at = self._at + 1

    def read(self) -> list[int]:
        return self._tokens.tolist()

    def close(self) -> None:
        pass


class Graph:
    """One step as a CUDA graph, replayed."""

    ahead = 1

    def __init__(self, choice: Choice, tokens: Tensor, at: Tensor) -> None:
        self._tokens, self._at = tokens.clone(), at.clone()
        self._host = torch.empty(2, len(tokens), dtype=tokens.dtype, device="cpu", pin_memory=True)
        self._ready = [torch.cuda.Event(), torch.cuda.Event()]  # type: ignore[no-untyped-call]
        self._begun = self._read = 0
        self._turns = choice.decoder.turns_up_to(choice.cache.positions, tokens.device)
        """The graph has their address; a longer generation gives the decoder others."""
        with torch.inference_mode(), torch.cuda.device(tokens.device):
            self._graph = self._capture(choice)

    def _capture(self, choice: Choice) -> torch.cuda.CUDAGraph:
        """The graph of a step, after one step that compiles what is not compiled yet and is taken back."""
        longest = choice.cache.positions
        tokens, at, state = self._tokens.clone(), self._at.clone(), choice.generator.get_state()
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            choice.next(self._tokens, self._at, longest)
        torch.cuda.current_stream().wait_stream(beside)
        choice.generator.set_state(state)
        graph = torch.cuda.CUDAGraph()
        if choice.sampling.temperature:
            graph.register_generator_state(choice.generator)
        try:
            with torch.cuda.graph(graph, stream=beside, capture_error_mode="thread_local"):
                self._tokens.copy_(choice.next(self._tokens, self._at, longest))
                self._at.add_(1)
        except RuntimeError as error:
            release_generators(self._at.device, choice.generator)
            raise CaptureError(explained(error)) from error
        self._tokens.copy_(tokens)
        self._at.copy_(at)
        return graph

    def begin(self) -> None:
        slot = self._begun % 2
        self._begun += 1
        with torch.inference_mode(), torch.cuda.device(self._tokens.device):
            self._graph.replay()
            self._host[slot].copy_(self._tokens, non_blocking=True)
            self._ready[slot].record()

    def read(self) -> list[int]:
        slot = self._read % 2
        self._read += 1
        self._ready[slot].synchronize()
        return self._host[slot].tolist()

    def close(self) -> None:
        while self._read < self._begun:
            self.read()


def release_generators(device: torch.device, own: torch.Generator) -> None:
    """A capture that failed leaves generators waiting for its end, and they draw nothing: give each a new state."""
    index = torch.cuda.current_device() if device.index is None else device.index
    for generator in (torch.cuda.default_generators[index], own):
        generator.graphsafe_set_state(generator.clone_state())


def explained(error: BaseException) -> str:
    """Why a step cannot be captured: the first thing that went wrong, and where."""
    while error.__context__ is not None:
        error = error.__context__
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})" if frames else ""
    first = str(error).strip().splitlines()[:1] or [type(error).__name__]
    return (
        f"cuda_graph=True: a step of this decoder cannot be captured as a CUDA graph: {first[0]}{where}. Usually a "
        "module copies to the host or asks for a number on its way (.item(), .tolist(), a condition on a tensor). Run "
        "it with generate(..., cuda_graph=False), or narrowcast generate --no-cuda-graph."
    )
