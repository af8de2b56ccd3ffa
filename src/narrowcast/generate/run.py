"""Prompts in, tokens out, one step at a time.

Each prompt is read by itself, without padding; then all sequences take steps together. A sequence ends with one of the
model's end tokens, or when it has its tokens; the others go on. `Generation` is an iterator over steps, so that text
can be shown while it is written, and says what it took. On CUDA a step is one CUDA graph (steps.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral

import torch
from torch import Tensor

from narrowcast.errors import DtypeError, LogitsError, ModelKindError, ShapeError, SpecError
from narrowcast.generate.cache import Cache
from narrowcast.generate.checks import check_calls, check_dtypes, check_numbers
from narrowcast.generate.decoder import Decoder
from narrowcast.generate.kernels import kernels_for
from narrowcast.generate.layers import whole_layers
from narrowcast.generate.sampling import NONE, Sampling
from narrowcast.generate.steps import Choice, Eager, Graph, Steps

Prompt = Sequence[int] | Tensor
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32)


def generate(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    *,
    stop_at_end: bool = True,
    cuda_graph: bool = True,
) -> Generation:
    """Continue every prompt by up to `max_new_tokens` tokens; `stop_at_end=False` writes on after an end token.

    Iterate over what comes back to get, after each step, the new token of each sequence, or None where it has ended.
    On a GPU a step is captured as a CUDA graph and replayed, unless `cuda_graph=False`.
    """
    return Generation(decoder, prompts, max_new_tokens, sampling or Sampling(), stop_at_end, cuda_graph)


class Generation:
    """One batch of texts that is being written. `tokens` has what was written so far, for each prompt."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        sampling: Sampling,
        stop_at_end: bool,
        cuda_graph: bool,
    ) -> None:
        if not isinstance(decoder, Decoder):
            raise ModelKindError(
                f"decoder: expected a narrowcast.generate.Decoder, got a {type(decoder).__name__}. Read a folder of "
                "transformers with load_decoder(path), or make one with random_decoder(shape)."
            )
        if not isinstance(sampling, Sampling):
            raise SpecError(f"sampling={sampling!r}: expected a Sampling, such as Sampling(temperature=0.8), or None.")
        if not isinstance(prompts, Iterable):
            raise ShapeError(f"prompts: expected a list of prompts, each a list of tokens, got {prompts!r}.")
        check_numbers(decoder)
        self._decoder, self._sampling = decoder, sampling
        device = decoder.model.norm.weight.device
        self._prompts = [_as_tokens(prompt, i, decoder.shape.words, device) for i, prompt in enumerate(prompts)]
        self._limit = _checked_count(max_new_tokens)
        self._ends = frozenset(decoder.shape.ends if stop_at_end else ())
        if not self._prompts:
            raise ShapeError("prompts: is empty. Give at least one: generate(decoder, [[1, 15043]]).")
        longest = max(len(prompt) for prompt in self._prompts) + self._limit
        if longest > decoder.shape.context:
            raise ShapeError(
                f"max_new_tokens={max_new_tokens}: the longest prompt and its continuation take {longest} positions, "
                f"and the model was made for {decoder.shape.context}. Ask for fewer tokens, or shorten the prompt."
            )
        check_calls(decoder)
        check_dtypes(decoder, device)
        dtype = decoder.model.norm.weight.dtype
        self._cache = Cache(decoder.shape, len(self._prompts), longest, dtype, device)
        self._kernels = kernels_for(decoder, device)
        self._whole, self.layers = whole_layers(decoder, self._cache, self._kernels)
        """`layers`: "native" where all layers of a step are one call of the compiled core, or why they are not."""
        self._in_graph = cuda_graph and device.type == "cuda"
        self._started = False
        self.tokens: list[list[int]] = [[] for _ in self._prompts]
        self.prefill_seconds = 0.0
        """Until the first token of every sequence was chosen."""
        self.capture_seconds = 0.0
        """Until a step was captured as a CUDA graph, which no other figure counts."""
        self.step_seconds = 0.0
        """All steps after the first."""
        self.steps = 0
        """Steps after the first."""

    @property
    def tokens_per_second(self) -> float:
        """Of all sequences together, after the first token of each."""
        written = sum(max(len(tokens) - 1, 0) for tokens in self.tokens)
        return written / self.step_seconds if self.step_seconds else 0.0

    @property
    def cache_bytes(self) -> int:
        return self._cache.nbytes

    @property
    def kernels(self) -> str:
        """What runs between products: "triton", or "torch" and, on a GPU, why."""
        return self._kernels.name

    def run(self) -> list[list[int]]:
        """Write to the end; the tokens of each sequence, its prompt not among them."""
        for _ in self:
            pass
        return self.tokens

    def __iter__(self) -> Iterator[list[int | None]]:
        if self._started:
            raise RuntimeError("this Generation has been iterated over already. Its texts are in .tokens.")
        self._started = True
        return self._steps()

    def _steps(self) -> Iterator[list[int | None]]:
        began = time.perf_counter()
        generator = self._sampling.generator(self._cache.keys.device)
        with torch.inference_mode():
            chosen = self._sampling.choose(self._read_prompts(), generator)
        new = self._take(chosen.tolist())
        self.prefill_seconds = time.perf_counter() - began
        yield new
        if self._limit == 1 or self._all_done():
            return
        steps = self._make_steps(chosen, generator)
        try:
            yield from self._follow(steps)
        finally:
            steps.close()

    def _make_steps(self, chosen: Tensor, generator: torch.Generator) -> Steps:
        lengths = [len(prompt) for prompt in self._prompts]
        at = torch.tensor(lengths, dtype=torch.int64, device=chosen.device)
        choice = Choice(self._decoder, self._cache, self._kernels, self._sampling, generator, self._whole)
        if not self._in_graph:
            return Eager(choice, chosen, at, max(lengths))
        began = time.perf_counter()
        steps = Graph(choice, chosen, at)
        torch.cuda.synchronize(chosen.device)
        self.capture_seconds = time.perf_counter() - began
        return steps

    def _follow(self, steps: Steps) -> Iterator[list[int | None]]:
        """Take steps until all sequences have ended; none is begun that has no position in the cache."""
        begun = 0
        while not self._all_done():
            began = time.perf_counter()
            while begun < min(self.steps + 1 + steps.ahead, self._limit - 1):
                steps.begin()
                begun += 1
            new = self._take(steps.read())
            self.step_seconds += time.perf_counter() - began
            self.steps += 1
            yield new

    def _read_prompts(self) -> Tensor:
        logits = [self._decoder.prefill(prompt, self._cache, i) for i, prompt in enumerate(self._prompts)]
        return torch.stack(logits)

    def _take(self, chosen: list[int]) -> list[int | None]:
        """Add the tokens of sequences that have not ended."""
        new: list[int | None] = []
        for i, token in enumerate(chosen):
            if token == NONE and not self._done(i):
                raise LogitsError(
                    f"generate: sequence {i} has logits of NaN or infinity after {len(self.tokens[i])} new tokens. "
                    "Either a weight holds a NaN or an infinity, of which a codec makes a block of NaNs (narrowcast "
                    "inspect names it), or activations are too large for fp16: load the model in torch.bfloat16. What "
                    "was written until here is in .tokens."
                )
            new.append(None if self._done(i) else token)
            if new[-1] is not None:
                self.tokens[i].append(token)
        return new

    def _all_done(self) -> bool:
        return all(self._done(i) for i in range(len(self._prompts)))

    def _done(self, sequence: int) -> bool:
        tokens = self.tokens[sequence]
        return len(tokens) >= self._limit or bool(tokens and tokens[-1] in self._ends)


def _as_tokens(prompt: Prompt, number: int, words: int, device: torch.device) -> Tensor:
    try:
        tokens = torch.as_tensor(prompt, dtype=None, device=device)  # the caller's own dtype, checked below
    except (TypeError, ValueError, RuntimeError) as error:
        raise DtypeError(
            f"prompts[{number}]: expected a list of tokens, got a {type(prompt).__name__} that makes no tensor "
            f"({error}). A text goes through its model's tokenizer first."
        ) from None
    if tokens.dim() != 1 or len(tokens) == 0:
        raise ShapeError(
            f"prompts[{number}]: expected at least one token, [time], got shape {list(tokens.shape)}. A text goes "
            "through its model's tokenizer first."
        )
    if tokens.dtype not in INTEGERS:
        raise DtypeError(f"prompts[{number}]: tokens must be whole numbers, and these are {tokens.dtype}.")
    tokens = tokens.to(torch.int64)
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= words:
        raise ShapeError(
            f"prompts[{number}]: tokens must be from 0 to {words - 1}, and these are from {least} to {most}. They come "
            "from another model's tokenizer."
        )
    return tokens


def _checked_count(max_new_tokens: int) -> int:
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
        raise ShapeError(f"max_new_tokens={max_new_tokens}: must be a whole number, at least 1.")
    return int(max_new_tokens)
