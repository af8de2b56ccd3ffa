"""The gradients of all simulated workers, in one vector each.

`Flat` lays a model's parameters into one vector and has room for every worker's gradient. Two functions fill that room:
`one_by_one` says what is meant, with any model; `AllAtOnce` does the same in one forward and one backward pass.

The forward pass, and the gradients of activations, are those of one large batch: all workers have the same weights.
Only gradients of parameters differ by worker. So `AllAtOnce` takes parameters out of autograd, notes what each module
was given, and multiplies that with what comes back, worker by worker: a batched product for a Linear. It knows Linear,
Embedding and LayerNorm, and refuses other modules that hold parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""The mean over a batch."""


class Flat:
    """A model whose parameters are views of one vector: matrices, zeros up to a multiple of 128 workers, vectors."""

    def __init__(self, model: nn.Module, workers: int) -> None:
        self.model, self.workers = model, workers
        self.matrices = [p for p in model.parameters() if p.dim() > 1]
        self.vectors = [p for p in model.parameters() if p.dim() <= 1]
        self.numel = sum(p.numel() for p in self.matrices)
        self.compressed = -(-self.numel // (workers * 128)) * workers * 128
        """Elements that travel in a codec, the zeros after the matrices counted."""
        rest = sum(p.numel() for p in self.vectors)
        like = self.matrices[0].detach()
        self.values = like.new_zeros(self.compressed + rest)
        self.of_matrices = like.new_zeros(workers, self.compressed)
        """The gradients of all workers."""
        self.of_vectors = like.new_zeros(workers, rest)
        self.gradients: dict[nn.Parameter, Tensor] = {}
        """The same by parameter: [workers, *shape]."""
        for parameters, first, room in (
            (self.matrices, 0, self.of_matrices),
            (self.vectors, self.compressed, self.of_vectors),
        ):
            start = 0
            for p in parameters:
                end = start + p.numel()
                place = self.values[first + start : first + end].view_as(p)
                p.data = place.copy_(p.data)
                self.gradients[p] = room[:, start:end].view(workers, *p.shape)
                start = end

    def by_matrix(self, vector: Tensor) -> list[Tensor]:
        """Views of a vector that is laid out as `values` is, one for each matrix."""
        parts = vector[: self.numel].split([p.numel() for p in self.matrices])
        return [part.view_as(p) for part, p in zip(parts, self.matrices, strict=True)]


def one_by_one(flat: Flat, loss: Loss, inputs: Tensor, targets: Tensor) -> None:
    """Fill the gradients, each worker's with a backward pass of its own."""
    parameters = [p for p in flat.gradients if p.requires_grad]
    for worker, (x, y) in enumerate(zip(inputs.chunk(flat.workers), targets.chunk(flat.workers), strict=True)):
        for p, gradient in zip(parameters, torch.autograd.grad(loss(flat.model, x, y), parameters), strict=True):
            flat.gradients[p][worker].copy_(gradient)


class AllAtOnce:
    """Fills the gradients of a model of Linear, Embedding and LayerNorm in one pass."""

    def __init__(self, flat: Flat, loss: Loss) -> None:
        self._flat, self._loss, self._sequences = flat, loss, 0
        for module in flat.model.modules():
            if own := list(module.parameters(recurse=False)):
                kind = type(module)
                if kind not in WRITERS:
                    raise TypeError(
                        f"model: {kind.__name__} holds parameters; only {[k.__name__ for k in WRITERS]} may"
                    )
                module.register_forward_hook(self._note)
                for p in own:
                    p.requires_grad_(False)

    def __call__(self, inputs: Tensor, targets: Tensor) -> None:
        self._sequences = len(inputs)
        # A mean over all workers is 1/workers of the sum of their means.
        (self._flat.workers * self._loss(self._flat.model, inputs, targets)).backward()

    def _note(self, module: nn.Module, inputs: Sequence[Tensor], output: Tensor) -> Tensor:
        given = inputs[0].detach()
        if not torch.is_grad_enabled():
            return output
        if isinstance(module, nn.Embedding):
            if given.dim() == 1:  # positions, which all sequences share
                given = given.expand(self._sequences, -1)
                output = output.expand(self._sequences, *output.shape)
            output = output.detach().requires_grad_()
        places = {name: self._flat.gradients[p] for name, p in module.named_parameters(recurse=False)}
        output.register_hook(lambda back: WRITERS[type(module)](module, places, self._apart(given), self._apart(back)))
        return output

    def _apart(self, x: Tensor) -> Tensor:
        """[sequences, time, ...] -> [workers, sequences and time of each, ...]."""
        return x.reshape(self._flat.workers, -1, *x.shape[2:])


def _of_linear(module: nn.Module, places: dict[str, Tensor], x: Tensor, back: Tensor) -> None:
    torch.bmm(back.mT, x, out=places["weight"])
    if "bias" in places:
        torch.sum(back, 1, out=places["bias"])


def _of_embedding(module: Any, places: dict[str, Tensor], x: Tensor, back: Tensor) -> None:
    # A product with zeros and ones: sums in the same order every time, which index_add_ on a GPU does not keep.
    chosen = x[..., None] == torch.arange(module.num_embeddings, device=x.device)
    torch.bmm(chosen.to(back.dtype).mT, back, out=places["weight"])


def _of_norm(module: Any, places: dict[str, Tensor], x: Tensor, back: Tensor) -> None:
    torch.sum(back * F.layer_norm(x, module.normalized_shape, eps=module.eps), 1, out=places["weight"])
    torch.sum(back, 1, out=places["bias"])


WRITERS: dict[type[nn.Module], Callable[[nn.Module, dict[str, Tensor], Tensor, Tensor], None]] = {
    nn.Linear: _of_linear,
    nn.Embedding: _of_embedding,
    nn.LayerNorm: _of_norm,
}
"""What writes the gradients of a module's parameters, given its inputs and the gradients of its outputs."""
