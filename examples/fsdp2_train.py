"""A byte-level GPT under FSDP2: gradients are reduce-scattered in 4 bits, parameters gathered in 8.

    torchrun --nproc-per-node 2 examples/fsdp2_train.py [--codec int4] [--gather int8] [--steps 100]
    python examples/fsdp2_train.py        # the same with one process, which sends nothing

`--gather none` gathers parameters without a codec. The sharded parameters, which the optimizer and checkpoints see,
stay exact.
"""

import argparse
import os
import time
from itertools import islice

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowcast as nc
from narrowcast.byte_gpt import ByteGPT, GPTConfig, batches, loss_of, stdlib_text


def join() -> torch.device:
    """Join the ranks that torchrun started, or be the only one."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **alone)
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--gather", default="int8")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="of each rank")
    parser.add_argument("--every", type=int, default=10, help="steps between two lines")
    options = parser.parse_args()
    device = join()
    rank, mesh = dist.get_rank(), init_device_mesh(device.type, (dist.get_world_size(),))

    model = ByteGPT(GPTConfig(options.layers, options.width)).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    gather = None if options.gather == "none" else options.gather
    compression = nc.compress_gradients(model, options.codec, gather=gather)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    data = batches(stdlib_text(), model.config.context, options.batch, seed=0, rank=rank)
    start = time.perf_counter()
    for step, (inputs, targets) in enumerate(islice(data, options.steps), 1):
        loss = loss_of(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % options.every == 0 or step == options.steps):
            print(f"step {step:5d}   loss {loss.item():.4f}   {time.perf_counter() - start:6.1f} s")
    if rank == 0:
        stats = compression.stats()
        sent, plain = stats.sent_bytes / 1e6, stats.plain_bytes / 1e6
        print(f"gradients: sent {sent:.1f} MB a rank in place of {plain:.1f}: {stats.ratio:.1f}x")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
