"""A byte-level GPT learns Python from the standard library's source, with gradients sent in a few bits.

    torchrun --nproc-per-node 4 examples/ddp_train.py [--codec int4] [--steps 200] [--folder run]
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 4 --max-restarts 3 --rdzv-backend c10d \
        --rdzv-endpoint localhost:29500 examples/ddp_train.py --folder run     # goes on when a rank is killed
    python examples/ddp_train.py        # the same with one process, which sends nothing

`--codec` takes any codec, "auto" to let narrowcast measure the link and choose, or "none". With `--folder`, there is
a checkpoint now and then, of all ranks (checkpoints.py). The next call, or the ranks that torchrun starts again, go on
from there: bit for bit on as many ranks; on others, residuals are re-dealt. (Without that variable torch 2.13 gives
ranks that are started again the old store, and they look for each other where they were.)
"""

import argparse
import itertools
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoints import resume, save  # beside this file
from torch.nn.parallel import DistributedDataParallel

import narrowcast as nc
from narrowcast.byte_gpt import ByteGPT, GPTConfig, batches, loss_of, stdlib_text


def join() -> torch.device:
    """Join the ranks that torchrun started, or be the only one."""
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", **alone)
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--warmup", type=int, default=0, help="uncompressed steps")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="of each rank")
    parser.add_argument("--every", type=int, default=20, help="steps between two lines")
    parser.add_argument("--folder", type=Path, help="for checkpoints")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints")
    options = parser.parse_args()
    device = join()
    rank = dist.get_rank()

    model = DistributedDataParallel(ByteGPT(GPTConfig(options.layers, options.width)).to(device))
    codec = None if options.codec == "none" else options.codec
    compression = nc.compress_gradients(model, codec, warmup_steps=options.warmup)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    parts = model.module, optimizer, compression
    first = resume(options.folder, *parts) if options.folder else 0
    data = batches(stdlib_text(), model.module.config.context, options.batch, seed=0, rank=rank)
    start = time.perf_counter()
    for step, (inputs, targets) in enumerate(itertools.islice(data, first, options.steps), first + 1):
        loss = loss_of(model(inputs.to(device)), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % options.every == 0 or step == options.steps):
            print(f"step {step:5d}   loss {loss.item():.4f}   {time.perf_counter() - start:6.1f} s", flush=True)
        if options.folder and (step % options.save_every == 0 or step == options.steps):
            save(options.folder, step, *parts)

    if rank == 0:
        stats = compression.stats()
        sent, plain = stats.sent_bytes / 1e6, stats.plain_bytes / 1e6
        print(f"sent {sent:.1f} MB a rank in place of {plain:.1f}: {stats.ratio:.1f}x")
        print(f"{stats.hidden_seconds:.2f} s of it behind backward, {stats.exposed_seconds:.2f} s not")
        print(f"residuals: {stats.residual_bytes / 1e6:.1f} MB, norm {stats.residual_norm:.3g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
