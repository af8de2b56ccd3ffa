"""Compressed gradients: from a trainer's buckets to the wire, and back.

compress.py       compress_gradients, the one line that a training script adds
compression.py    GradientCompression: what travels in what, and what is remembered from step to step
options.py        its arguments; state.py: what it saves; telemetry.py: what it counts
ddp.py            how DistributedDataParallel hands over its gradients
buckets.py        a bucket of DDP through the two-stage reduction
fsdp.py           how FSDP2 does, and fetches its parameters; fsdp_torch.py: what is known of its inside
shards.py         the shards of a parameter group on their way
columns.py        where gradients lie in the rows that are reduced
feedback.py       error feedback: what a quantization lost is sent next
"""

from narrowcast.distributed.gradients.compress import compress_gradients
from narrowcast.distributed.gradients.compression import GradientCompression
from narrowcast.distributed.gradients.ddp import gradient_hook

__all__ = ["GradientCompression", "compress_gradients", "gradient_hook"]
