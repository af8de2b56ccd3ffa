"""Local SGD between sites: ranks train on their own, and rarely average their parameters, in 4 bits.

    torchrun --nproc-per-node 2 examples/local_sgd.py [--codec int4] [--alone 20] [--rounds 10]
    ... --outer-lr 0.7 --outer-momentum 0.9     # DiLoCo: the averaged change is the gradient of an outer Nesterov step
    python examples/local_sgd.py        # the same with one process, which sends nothing

A rank sends the change of its parameters since the last average, plus the residual of the last time. So 4 bits suffice,
and all ranks have the same parameters after each average, bit for bit. docs/momentum.md says when this is worth it.
"""

import argparse
import os
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import narrowcast as nc
from narrowcast import distributed as ncd
from narrowcast.byte_gpt import ByteGPT, GPTConfig, batches, loss_of, stdlib_text


class ParameterAverage:
    """The parameters of the last average, and the residual of this rank.

    With `outer_lr` and `outer_momentum`, parameters go from there by a Nesterov step, for which the average of all
    changes is the gradient (DiLoCo, arXiv 2311.08105). Without them, they become the average.
    """

    def __init__(self, model: torch.nn.Module, codec: str, outer_lr: float = 1.0, outer_momentum: float = 0.0) -> None:
        self.model, self.codec = model, nc.codec(codec)
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.last = parameters_to_vector(model.parameters()).detach()
        self.residual, self.velocity = torch.zeros_like(self.last), torch.zeros_like(self.last)

    def update(self) -> None:
        """Set the parameters of all ranks to their average, or to where the outer step leads."""
        change = parameters_to_vector(self.model.parameters()).detach() - self.last + self.residual
        sent = nc.decode(nc.encode(change, self.codec))  # about what the others receive
        self.residual = change - sent
        ncd.all_reduce(sent, dist.ReduceOp.AVG, codec=self.codec)
        self.velocity = self.outer_momentum * self.velocity + sent
        self.last += self.outer_lr * (sent + self.outer_momentum * self.velocity)
        vector_to_parameters(self.last.clone(), self.model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--alone", type=int, default=20, help="steps between two averages")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--outer-lr", type=float, default=1.0)
    parser.add_argument("--outer-momentum", type=float, default=0.0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="of each rank")
    options = parser.parse_args()
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)
    rank = dist.get_rank()

    model = ByteGPT(GPTConfig(options.layers, options.width))
    average = ParameterAverage(model, options.codec, options.outer_lr, options.outer_momentum)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = batches(stdlib_text(), model.config.context, options.batch, seed=0, rank=rank)
    for number in range(1, options.rounds + 1):
        for inputs, targets in islice(data, options.alone):
            loss = loss_of(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        average.update()
        if rank == 0:
            print(f"average {number:3d}   loss before it, on rank 0: {loss.item():.4f}")
    if rank == 0 and dist.get_world_size() > 1:
        stats = ncd.stats()["all_reduce"]
        every_step = 4 * average.last.numel() * options.alone * options.rounds / 1e6
        print(f"sent {stats.sent_bytes / 1e6:.2f} MB; fp32 gradients in every step would have been {every_step:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
