"""A mixture of experts that sends tokens in 8 bits, and their gradients in 4.

    torchrun --nproc-per-node 2 examples/moe_all_to_all.py [--codec int8:block=row] [--backward-codec int4]
    python examples/moe_all_to_all.py        # the same with one process, which sends nothing

Each rank holds one expert. A router sends every token to the expert with the highest score, in one all-to-all with a
scale for each token; a second all-to-all returns the results. The router learns which kind of token goes where.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowcast import distributed as ncd


class Mixture(nn.Module):
    """A router, and one expert on each rank."""

    def __init__(self, width: int, codecs: dict[str, str]) -> None:
        super().__init__()
        self.router = nn.Linear(width, dist.get_world_size())
        torch.manual_seed(dist.get_rank())  # experts differ
        self.expert = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.codecs = codecs

    def forward(self, tokens: Tensor) -> Tensor:
        weights = self.router(tokens).softmax(-1)
        likes, chosen = weights.max(-1)
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=dist.get_world_size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)  # how many come from where
        splits = received.tolist(), sent.tolist()
        here = ncd.functional.all_to_all_single(tokens[order], *splits, **self.codecs)
        back = ncd.functional.all_to_all_single(self.expert(here), *splits[::-1], **self.codecs)
        return torch.empty_like(back).index_copy(0, order, back) * likes[:, None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="int8:block=row")
    parser.add_argument("--backward-codec", default="int4")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512, help="a step, on each rank")
    parser.add_argument("--every", type=int, default=20, help="steps between two lines")
    options = parser.parse_args()
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank, size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = Mixture(options.width, {"codec": options.codec, "backward_codec": options.backward_codec})
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    marks, turns = torch.randn(2, 4, options.width, generator=torch.Generator().manual_seed(1))
    draws = torch.Generator().manual_seed(100 + rank)
    for step in range(1, options.steps + 1):
        kind = torch.randint(4, (options.tokens,), generator=draws)
        tokens = torch.randn(options.tokens, options.width, generator=draws) + 2 * marks[kind]
        loss = (model(tokens) - tokens * turns[kind]).square().mean() / size
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.router.parameters():  # the router is the same everywhere; its gradient is small
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if rank == 0 and (step % options.every == 0 or step == options.steps):
            print(f"step {step:4d}   loss {loss.item() * size:.4f}")
    if rank == 0 and size > 1:
        stats = ncd.stats()["all_to_all_single"]
        print(f"sent {stats.sent_bytes / 1e6:.1f} MB in place of {stats.plain_bytes / 1e6:.1f}: {stats.ratio:.1f}x")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
