"""Local SGD between sites: ranks train on their own, and rarely average their parameters, in 4 bits.

    torchrun --nproc-per-node 2 examples/local_sgd.py [--codec int4] [--sync-every 20] [--steps 200]
    ... --sync-every growing                    # intervals of 1, 2, 4, 8, 16 steps
    ... --outer-lr 0.7 --outer-momentum 0.9     # DiLoCo: the averaged change is the gradient of an outer Nesterov step
    python examples/local_sgd.py                # the same with one process, which sends nothing

It is one argument of `compress_gradients`, and the loop is any DDP script's. docs/meetings.md says when it is worth it.
"""

import argparse
import os
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast.byte_gpt import ByteGPT, GPTConfig, batches, loss_of, stdlib_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--sync-every", default="20", help="steps between two meetings, or growing")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--outer-lr", type=float, default=1.0)
    parser.add_argument("--outer-momentum", type=float, default=0.0)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="of each rank")
    options = parser.parse_args()
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **alone)

    ddp = DistributedDataParallel(ByteGPT(GPTConfig(options.layers, options.width)))
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-3)
    compression = nc.compress_gradients(
        ddp,
        options.codec,
        sync_every=int(options.sync_every) if options.sync_every.isdigit() else options.sync_every,
        optimizer=optimizer,
        outer_lr=options.outer_lr,
        outer_momentum=options.outer_momentum,
    )
    data = batches(stdlib_text(), ddp.module.config.context, options.batch, seed=0, rank=dist.get_rank())
    for step, (inputs, targets) in enumerate(islice(data, options.steps), 1):
        loss = loss_of(ddp(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 and dist.get_rank() == 0:
            print(f"step {step:4d}   loss of rank 0: {loss.item():.4f}")
    compression.sync()  # all ranks end with the same parameters, bit for bit
    if dist.get_rank() == 0:
        print(compression)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
