"""What runs CUDA kernels on a CPU (emulated/): what it forbids, and what its instructions give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from emulated.device import Broken, Emulator
from test_cuda_emulated import emulator

from narrowcast.kernels.cuda import nvrtc
from narrowcast.kernels.cuda.formats import sources

__all__ = ["emulator"]  # a fixture

GATE = """
    Gate* const gate = (Gate*)s;
    if (threadIdx.x == 0) set_gate(gate, {});
    __syncthreads();
    if (threadIdx.x == 0) pass(gate);
    {}
    y[threadIdx.x] = threadIdx.x;
"""


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("y[threadIdx.x] = x[threadIdx.x + n];", "touches memory that is not its own"),
        ("y[threadIdx.x + 1] = 0;", "touches memory that is not its own"),
        ("y[int(threadIdx.x) - 1] = 0;", "memory was written that is not the output"),
        ("((float*)x)[threadIdx.x] = 0;", "memory was written that is not the output"),
        ("y[threadIdx.x] = ((const float4*)(x + 1))->x;", "breaks a rule"),
        ("s[threadIdx.x] = x[threadIdx.x]; y[threadIdx.x] = s[threadIdx.x ^ 32];", "a barrier is missing"),
        ("s[threadIdx.x] = x[threadIdx.x]; y[threadIdx.x] = s[threadIdx.x ^ 1];", "a barrier is missing"),
        ("if (threadIdx.x < 32) __syncthreads(); y[threadIdx.x] = 0;", "barrier that another thread never reaches"),
        ("if (threadIdx.x < 8) __syncthreads(); y[threadIdx.x] = 0;", "is not where the first thread of its warp"),
        ("if (threadIdx.x < 8) __syncwarp(); else __shfl_xor_sync(~0u, 1.0f, 1);", "does another thing with its warp"),
        ("s[n + threadIdx.x] = 0; y[threadIdx.x] = 0;", "past the shared memory"),
        ("meet(1, 96); y[threadIdx.x] = 0;", "barrier that another thread never reaches"),
        ("pass((Gate*)s); y[threadIdx.x] = 0;", "uses a gate that nobody has set"),
        (GATE.format(2, "await_gate(gate, 0);"), "barrier that another thread never reaches"),
        (GATE.format(1, "if (threadIdx.x == 0) expect(gate, 16), pass(gate);"), "once more than its phase is for"),
    ],
)
def test_the_emulator_says_what_a_kernel_may_not_do(emulator: Emulator, tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(Broken, match=said):
        run_body(emulator, tmp_path, body, torch.arange(64.0), torch.empty(64))


def run_body(emulator: Emulator, folder: Path, body: str, x: Tensor, y: Tensor) -> Tensor:
    """A kernel of one block of 64 threads, n elements of x and y, and 64 floats of shared memory."""
    kinds = {torch.float32: "float", torch.int16: "u16", torch.int32: "u32"}
    source = folder / "own.cu"
    source.write_text(
        f'extern "C" __global__ void own(const {kinds[x.dtype]}* x, int n, {kinds[y.dtype]}* y) '
        f"{{ extern __shared__ float s[]; {body} }}"
    )
    instructions = sources("tile")[0]
    function = emulator.function((instructions, source), "own", (("X", 1),), None)
    function(1, 64, 4 * 64, (x, nvrtc.Int(len(x)), y))
    return y


def test_the_emulator_lets_a_right_kernel_run(emulator: Emulator, tmp_path: Path) -> None:
    body = """
        const int i = threadIdx.x;
        s[i] = x[i];
        __syncthreads();
        y[i] = s[i ^ 32] + __shfl_xor_sync(~0u, x[i], 1);
    """
    i = torch.arange(64)
    assert torch.equal(run_body(emulator, tmp_path, body, i.float(), torch.empty(64)), ((i ^ 32) + (i ^ 1)).float())


def test_a_gate_lets_threads_pass_phase_by_phase(emulator: Emulator, tmp_path: Path) -> None:
    body = GATE.format(1, "await_gate(gate, 0); if (threadIdx.x < 32) meet(1, 32);")
    assert torch.equal(run_body(emulator, tmp_path, body, torch.arange(64.0), torch.empty(64)), torch.arange(64.0))


def test_fp8_is_what_torch_says(emulator: Emulator, tmp_path: Path) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    for kind, dtype in ((0, torch.float8_e4m3fn), (1, torch.float8_e5m2)):
        body = f"for (int i = threadIdx.x; i < n; i += 64) y[i] = half_value(fp8_pair(x[i] | x[i] << 8, {kind}) >> 16);"
        got = run_body(emulator, tmp_path, body, every.int(), torch.empty(256))
        right = every.view(dtype).float()
        assert torch.equal(got.isnan(), right.isnan())
        assert torch.equal(got[~right.isnan()], right[~right.isnan()])


def test_numbers_are_converted_as_torch_does(emulator: Emulator, tmp_path: Path) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32)
    loop = "for (int i = threadIdx.x; i < n; i += 64) y[i] = {};"
    halves = run_body(emulator, tmp_path, loop.format("half_value(x[i])"), every, torch.empty(1 << 16))
    assert torch.equal(halves.nan_to_num(7e5), every.to(torch.int16).view(torch.float16).float().nan_to_num(7e5))
    # Every seventh half and bfloat, the points halfway between two of them, and what is close to those.
    floats = torch.cat([halves, every.to(torch.int16).view(torch.bfloat16).float()]).view(torch.int32)
    steps = torch.tensor([0, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001], dtype=torch.int32)
    near = (floats[::7, None] + steps).flatten().view(torch.float32)
    for dtype, word in ((torch.float16, "half_bits"), (torch.bfloat16, "bfloat_bits")):
        got = torch.empty(len(near), dtype=torch.int16)
        run_body(emulator, tmp_path, loop.format(f"{word}(x[i])"), near, got)
        right = near.to(dtype)
        assert torch.equal(got.view(dtype).isnan(), right.isnan())
        assert torch.equal(got[~right.isnan()], right.view(torch.int16)[~right.isnan()])


def test_prmt_picks_bytes_and_signs(emulator: Emulator, tmp_path: Path) -> None:
    select = torch.tensor([0x3210, 0x7531, 0x5410, 0x7632, 0x0C8B] * 16, dtype=torch.int32)[:64]
    body = "y[threadIdx.x] = prmt(0x83221100u, 0x77665594u, x[threadIdx.x]);"
    got = run_body(emulator, tmp_path, body, select, torch.empty(64, dtype=torch.int32))
    right = [0x83221100, 0x77558311, 0x55941100, 0x77668322, 0x00FF00FF]
    assert [word & 0xFFFFFFFF for word in got[:5].tolist()] == right
