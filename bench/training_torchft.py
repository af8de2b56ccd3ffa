"""torchft's DiLoCo as a way of bench/training.py: ranks train alone, and take an outer step after some steps.

It wants torchft and its requirements on the path (`pip install torchft`), which narrowcast does not. Each rank is a
replica of its own, with its manager and its store; rank 0 has the lighthouse, through which replicas find each other
before each outer step. Changes of parameters travel in fp32, in one bucket: torchft's codec (fp8) runs on GPUs alone.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

PATIENCE = timedelta(seconds=120)


class TorchftDiLoCo:
    """Watches the steps of an optimizer, and meets the other ranks after every `every` of them by itself."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, every: int, outer: tuple[float, float]):
        from torchft import Manager, ProcessGroupGloo
        from torchft.local_sgd import DiLoCo

        here, ranks = _own_address(), dist.get_world_size()
        self._lighthouse, address = _lighthouse(here, ranks)
        self._store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=ranks,
            use_async_quorum=False,
            timeout=PATIENCE,
            quorum_timeout=PATIENCE,
            rank=0,
            world_size=1,
            store_addr=here,
            store_port=self._store.port,
            lighthouse_addr=address,
            replica_id=f"rank_{dist.get_rank()}",
            hostname=here,
            init_sync=False,  # all models start alike by their seed
        )
        rate, momentum = outer
        step = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum, nesterov=True)
        self._outer = DiLoCo(self._manager, [model], optimizer, step, every, pin_memory=False, use_bucketization=True)
        self._outer.__enter__()


def _own_address() -> str:
    """The address that others reach this rank at."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))
        address: str = probe.getsockname()[0]
        return address


def _lighthouse(here: str, ranks: int) -> tuple[Any, str]:
    """Rank 0's, and its address on every rank."""
    from torchft.coordination import LighthouseServer

    server = None
    if dist.get_rank() == 0:
        server = LighthouseServer(bind="0.0.0.0:0", min_replicas=ranks)
    port = [server.address().rsplit(":", 1)[1] if server else "", here]
    dist.broadcast_object_list(port, src=0)
    return server, f"http://{port[1]}:{port[0]}"
