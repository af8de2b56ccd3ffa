"""Compressed gradients: from a trainer's buckets to the wire, and back.

compress.py       compress_gradients, the one line that a training script adds
compression.py    GradientCompression: which codec, what it costs, what is kept from step to step
ddp.py, fsdp.py   how each trainer hands over its buckets; fsdp_groups.py, fsdp_steps.py: the inside of FSDP2
fsdp_gather.py    FSDP2's all-gather; fsdp_replicas.py: the all-reduce between replicas
reduction.py      the engine: one bucket through a reduction; side_by_side.py: a bucket's gradients as a matrix
hosted.py         the same where ranks share hosts; hosted_shards.py: of FSDP2
layout.py         where gradients lie in chunks
feedback.py       error feedback of one chunk; residuals.py: from step to step; outcome.py: whether a step counts
held.py           residuals of one chunk, in fp32 or in rows
momentum.py       AdamW's momentum in place of gradients; timetable.py: what travels in which step
gather.py         rows of every rank to all ranks: FSDP2's parameters, and averages within a host
options.py        arguments; parameters.py: names and exemptions; state.py: state dicts; stats.py: what is counted
redistribution.py residuals on another number of ranks
"""

from narrowcast.distributed.gradients.compress import compress_gradients
from narrowcast.distributed.gradients.compression import GradientCompression
from narrowcast.distributed.gradients.ddp import gradient_hook

__all__ = ["GradientCompression", "compress_gradients", "gradient_hook"]
