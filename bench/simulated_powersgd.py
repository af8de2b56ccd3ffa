"""PowerSGD (arXiv 1905.13727), as torch's hook has it, on simulated workers: each matrix travels as two thin ones.

Of the average of all workers, M, the product P = M Q is averaged and made orthogonal, then Q = M^T P is averaged, and
everyone takes P Q^T. Products are linear, so the averages are those of the average M. Each worker keeps what the result
lacks of its own matrix, and adds it to the next; Q is kept for the next step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from simulated_gradients import Flat


class PowerSGD:
    """The average of all workers' matrices in a low rank, with the residuals of all of them."""

    def __init__(self, rank: int, flat: Flat) -> None:
        self._flat, self.residuals = flat, torch.zeros_like(flat.of_matrices)
        self._by_shape: dict[torch.Size, list[int]] = {}
        for place, p in enumerate(flat.matrices):
            self._by_shape.setdefault(p.flatten(1).shape, []).append(place)
        generator = torch.Generator().manual_seed(0)
        self._first = {
            shape: torch.randn(len(places), shape[1], rank, generator=generator).to(flat.values.device)
            for shape, places in self._by_shape.items()
        }
        self._queries = {shape: query.clone() for shape, query in self._first.items()}
        both = sum(rank * sum(shape) * len(places) for shape, places in self._by_shape.items())
        self.bits = 32 * both / flat.numel

    def reset(self) -> None:
        self.residuals.zero_()
        for shape, query in self._queries.items():
            query.copy_(self._first[shape])

    def average(self, terms: Tensor) -> Tensor:
        """[workers, n] -> [n], as all workers end with it; `terms` become what was meant."""
        terms.add_(self.residuals)
        result = terms.mean(0)
        parts = self._flat.by_matrix(result)
        for shape, places in self._by_shape.items():
            matrices = torch.stack([parts[place].flatten(1) for place in places])
            left = _orthogonal(matrices @ self._queries[shape])
            torch.bmm(matrices.mT, left, out=self._queries[shape])
            for place, product in zip(places, left @ self._queries[shape].mT, strict=True):
                parts[place].copy_(product.view_as(parts[place]))
        torch.sub(terms, result, out=self.residuals)
        return result


def _orthogonal(matrices: Tensor) -> Tensor:
    """The columns of matrices [n, rows, rank], each without its part along those before it, and of length 1."""
    columns: list[Tensor] = []
    for column in matrices.unbind(2):
        for before in columns:
            column = column - (column * before).sum(1, keepdim=True) * before
        columns.append(column / (column.norm(dim=1, keepdim=True) + 1e-20))
    return torch.stack(columns, 2)
