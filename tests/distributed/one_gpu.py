"""Several ranks over NCCL on one GPU, for tests and for bench/nccl.py.

NCCL refuses two ranks on one GPU of a host, and tells hosts apart by NCCL_HOSTID. With another one for each rank it
takes its sockets, over loopback. Without MPS the ranks take turns on the GPU: right, but slow and not to be timed.

Under MPS a process gets few hardware queues if it does not ask for more, and kernels of independent streams wait for
each other in them: reductions slowed the matmuls beside them twice as much (bench/results/nccl.md). All processes
share one pool of queues: with 32 for each of four there was no memory for the last one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator


def environment(rank: int) -> dict[str, str]:
    """What a rank's environment has to say before its process group is made."""
    return {
        "NCCL_HOSTID": f"host{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_CUMEM_ENABLE": "0",
        "CUDA_DEVICE_MAX_CONNECTIONS": "16",
        "GLOO_SOCKET_IFNAME": "lo",
    }


@contextlib.contextmanager
def side_by_side() -> Iterator[bool]:
    """Let processes that are started in here share the GPU; whether they do, which takes MPS."""
    if shutil.which("nvidia-cuda-mps-control") is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield "CUDA_MPS_PIPE_DIRECTORY" in os.environ
        return
    with tempfile.TemporaryDirectory(prefix="mps", ignore_cleanup_errors=True) as folder:
        os.environ.update(CUDA_MPS_PIPE_DIRECTORY=folder, CUDA_MPS_LOG_DIRECTORY=folder)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        time.sleep(1.0)
        try:
            yield True
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False, timeout=30)
            del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]
