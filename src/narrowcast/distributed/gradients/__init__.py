"""Compressed gradients: from a trainer's buckets to the wire, and back.

compress.py       compress_gradients, the one line that a training script adds
compression.py    GradientCompression: what travels in what, and what is remembered from step to step
ddp.py            how DistributedDataParallel hands over its gradients
fsdp.py           how FSDP2 does, and fetches its parameters; fsdp_torch.py: what is known of its inside
columns.py        where gradients lie in the rows that are reduced
buckets.py        a bucket of DDP through the two-stage reduction
shards.py         the shards of a parameter group on their way
feedback.py       error feedback: what a quantization lost is sent next
telemetry.py      what it costs and loses
"""

from narrowcast.distributed.gradients.compress import compress_gradients
from narrowcast.distributed.gradients.compression import GradientCompression
from narrowcast.distributed.gradients.ddp import gradient_hook

__all__ = ["GradientCompression", "compress_gradients", "gradient_hook"]
