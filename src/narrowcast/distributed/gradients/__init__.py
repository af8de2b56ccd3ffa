"""Compressed gradients: from a trainer's buckets to the wire, and back.

compress.py       compress_gradients, the one line that a training script adds
compression.py    GradientCompression: which codec, what it costs, what is kept from step to step
ddp.py, fsdp/     how each trainer hands over its buckets; ddp_buckets.py: one of DDP; uncompressed.py: no codec
reduction.py      the engine: one bucket through a reduction; side_by_side.py: a bucket's gradients as a matrix
hosted.py         the same where ranks share hosts
layout.py         where gradients lie in chunks; buckets.py: flat buckets; runs.py: the rows that chunks are encoded in
error_feedback/   residuals: of one chunk, from step to step, on another number of ranks
meetings.py       when ranks that train alone meet, and where they go from there; local_updates.py: how, under DDP
momentum.py       AdamW's momentum in place of gradients; timetable.py: what travels in which step
gather.py         rows of every rank to all ranks: FSDP2's parameters, and averages within a host
options.py        arguments; parameters.py: names and exemptions; state.py: state dicts; stats.py: what is counted
"""

from narrowcast.distributed.gradients.compress import compress_gradients
from narrowcast.distributed.gradients.compression import GradientCompression
from narrowcast.distributed.gradients.ddp import gradient_hook

__all__ = ["GradientCompression", "compress_gradients", "gradient_hook"]
