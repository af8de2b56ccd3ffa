"""Quantized collectives: rows across ranks, under the names of torch.distributed.

from narrowcast import distributed as ncd

ncd.all_reduce(tensor, codec="int8")    # under torchrun, after init_process_group()
"""

from narrowcast.distributed import functional
from narrowcast.distributed.collectives import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    all_to_all_single,
    broadcast,
    reduce_scatter,
    reduce_scatter_tensor,
)
from narrowcast.distributed.gradients import GradientCompression, compress_gradients, gradient_hook
from narrowcast.distributed.point_to_point import irecv, isend, recv, send
from narrowcast.distributed.stats import OpStats, reset_stats, stats
from narrowcast.distributed.transport.work import Work

__all__ = [
    "GradientCompression",
    "OpStats",
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "compress_gradients",
    "functional",
    "gradient_hook",
    "irecv",
    "isend",
    "recv",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reset_stats",
    "send",
    "stats",
]
