"""The collectives once more, in one process: plain codec calls, no wire, no lane, no fused pass.

Each function takes the tensors of all ranks and says what every rank must end with, bit for bit. A large tensor is
reduced in chunks, the first of which fits the header; a chunk's parts start at multiples of 128 elements; sums run in
fp32 in rank order; what a rank has itself stays exact; a sum is divided before it is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from seeds import derived
from torch import Tensor

from narrowcast import Codec


def seed_for(codec: Codec, seed: int, rank: int, *key: int) -> int:
    """The seed of one encoding among all those of a collective."""
    return derived(derived(seed, rank), rank, *key) if codec.stochastic else 0


def parts(numel: int, world: int) -> list[slice]:
    """Which elements each rank owns."""
    units = -(-numel // 128)
    each = -(-units // world) * 128
    return [slice(min(numel, rank * each), min(numel, (rank + 1) * each)) for rank in range(world)]


def pieces(codec: Codec, numel: int, world: int) -> list[slice]:
    """What is reduced at a time: up to 768 KB a row in one go, else 128 KB first, then even pieces of up to 768 KB."""
    row = parts(numel, world)[0].stop
    total = codec.row_bytes(row)
    if total <= 768 * 1024:
        return [slice(0, numel)]
    unit = 128 * world
    first = row * (128 * 1024 - 256) // total // 128 * unit
    count = -(-total // (768 * 1024))
    each = -(-(numel - first) // (count * unit)) * unit
    return [slice(0, first), *(slice(start, min(numel, start + each)) for start in range(first, numel, each))]


def there(codec: Codec, rows: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    """Rows after a trip."""
    return codec.decode(codec.encode(rows, seed), rows.shape[-1], dtype)


def summed(codec: Codec, terms: Sequence[Tensor], owner: int, divisor: int, seed: int = 0, *key: int) -> Tensor:
    """The fp32 sum, at its owner, of one flat term per rank."""
    total = torch.empty(0)
    for rank, piece in enumerate(terms):
        if rank == owner:
            term = piece.float()
        else:
            term = there(codec, piece[None], seed_for(codec, seed, rank, owner, *key), torch.float32)[0]
        total = term if rank == 0 else total + term
    return total if divisor == 1 else total / torch.full_like(total, divisor)


def owned(codec: Codec, numel: int, world: int) -> list[tuple[int, int, slice]]:
    """The elements that one rank reduces at a time: (piece, owner, where), in order."""
    found = []
    for index, piece in enumerate(pieces(codec, numel, world)):
        for owner, mine in enumerate(parts(piece.stop - piece.start, world)):
            found.append((index, owner, slice(piece.start + mine.start, piece.start + mine.stop)))
    return found


def sums(codec: Codec, tensors: Sequence[Tensor], divisor: int = 1, seed: int = 0) -> Tensor:
    """What the owners hold before they encode it: a flat fp32 tensor."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    where = owned(codec, flat[0].numel(), len(flat))
    return torch.cat([summed(codec, [x[mine] for x in flat], r, divisor, seed, index) for index, r, mine in where])


def all_reduce(codec: Codec, tensors: Sequence[Tensor], divisor: int = 1, seed: int = 0) -> Tensor:
    world, total = len(tensors), sums(codec, tensors, divisor, seed)
    done = [
        there(codec, total[mine][None], seed_for(codec, seed, owner, world, index), tensors[0].dtype)[0]
        for index, owner, mine in owned(codec, total.numel(), world)
    ]
    return torch.cat(done).view(tensors[0].shape)


def reduce_scatter(codec: Codec, inputs: Sequence[Sequence[Tensor]], divisor: int = 1, seed: int = 0) -> list[Tensor]:
    """Every rank's output, given every rank's list of inputs."""
    outputs = []
    for owner, own in enumerate(inputs):
        terms = [one[owner].reshape(-1) for one in inputs]
        outputs.append(summed(codec, terms, owner, divisor, seed).to(own[owner].dtype).view(own[owner].shape))
    return outputs


def all_gather(codec: Codec, tensors: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    return [
        there(codec, codec.as_rows(x), seed_for(codec, seed, rank), x.dtype).view(x.shape)
        for rank, x in enumerate(tensors)
    ]


def all_to_all(codec: Codec, inputs: Sequence[Sequence[Tensor]], seed: int = 0) -> list[list[Tensor]]:
    """Every rank's list of outputs, given every rank's list of inputs."""

    def moved(source: int, target: int) -> Tensor:
        x = inputs[source][target]
        if source == target:
            return x
        return there(codec, codec.as_rows(x), seed_for(codec, seed, source, target), x.dtype).view(x.shape)

    ranks = range(len(inputs))
    return [[moved(source, target) for source in ranks] for target in ranks]


def all_reduce_bound(codec: Codec, tensors: Sequence[Tensor], divisor: int = 1, seed: int = 0) -> Tensor:
    """A bound, per element, on |all_reduce - the exact sum or average|.

    Let E be `Codec.max_error`, u = 2**-24, o the owner of an element, N the ranks, D the divisor.

    1. First quantization. Rank r's term is off by at most E(x_r), for r other than o; E sees the part alone, as the
       codec does. The owner's own term is only rounded to fp32: u |x_o|.
    2. The sum adds N terms in fp32, one after the other: at most (N - 1) u (1 + N u) times the sum of their
       magnitudes. Dividing rounds once more, u. Together with step 1 below (N + 2) 2u (sum |x_r| + E(x_r)).
    3. Second quantization. The owner holds a number s, and every rank decodes one that is off by at most E(s).
    4. It is rounded to the tensor's dtype: half its eps, times |s| + E(s), or half its smallest number.

    So |error| <= (sum over r != o of E(x_r) + (N + 2) 2u (sum |x_r| + E(x_r))) / D + E(s) + the rounding of step 4.
    """
    world, dtype = len(tensors), tensors[0].dtype
    flat = [tensor.reshape(-1) for tensor in tensors]
    held = sums(codec, tensors, divisor, seed)
    bounds = []
    for _, owner, mine in owned(codec, held.numel(), world):
        errors = [codec.max_error(x[mine]).double() for x in flat]
        size = torch.stack([x[mine].double().abs() + e for x, e in zip(flat, errors, strict=True)]).sum(0)
        first = torch.stack([e for rank, e in enumerate(errors) if rank != owner]).sum(0)
        s = held[mine]
        second = codec.max_error(s).double()
        info = torch.finfo(dtype)
        rounding = (s.double().abs() + second) * info.eps / 2 + info.smallest_normal * info.eps
        bounds.append((first + (world + 2) * 2.0**-23 * size) / divisor + second + rounding)
    return torch.cat(bounds).view(tensors[0].shape)
