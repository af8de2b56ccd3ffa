"""`which_kernel` names what really runs, for each operation."""

from __future__ import annotations

import pytest
import torch

import narrowcast as nc
from cases import CODECS
from narrowcast.errors import SpecError
from narrowcast.kernels.contract import Kernel
from narrowcast.kernels.operators import dispatch

ON_ROWS = ("encode", "decode", "decode_sum", "decode_sum_encode")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The kernels of a GPU on which CUDA can be compiled, asked but not run."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from narrowcast.kernels.cuda import choose
    from narrowcast.kernels.triton import launch

    kernel = launch.Triton()
    monkeypatch.setattr(dispatch, "kernel_for", lambda device_type: kernel)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(choose, "obstacle", lambda device: "")
    return kernel


def test_one_kernel_runs_all_operations_on_a_cpu() -> None:
    answers = {nc.which_kernel("nf4", "cpu", operation=operation) for operation in (*ON_ROWS, "linear")}
    assert answers == {nc.which_kernel("nf4")}


@pytest.mark.parametrize("operation", ["reduce", "encode_", "", "fake_quantize"])
def test_an_operation_that_codecs_do_not_have_is_refused(operation: str) -> None:
    with pytest.raises(SpecError, match=r"operation='.*': codecs have encode, decode, decode_sum, .* linear"):
        nc.which_kernel("int8", "cpu", operation=operation)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("operation", ON_ROWS)
def test_on_a_gpu_rows_are_tritons(operation: str) -> None:
    assert nc.which_kernel("int8", "cuda", operation=operation) == nc.which_kernel("int8", "cuda") == "triton"


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_products_run_in_cuda_for_the_codecs_it_knows() -> None:
    answers = {spec: nc.which_kernel(spec, "cuda", operation="linear") for spec in ("int8", "int4", "nf4", "fp8_e4m3")}
    assert set(answers.values()) == {"cuda"}
    others = ("int3", "sign", "bf16", "int8:zero_point=true", "int8:block=24")
    assert {nc.which_kernel(spec, "cuda", operation="linear") for spec in others} == {"triton"}


@pytest.mark.usefixtures("gpu")
def test_where_nothing_compiles_products_are_tritons_and_asking_warns_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowcast.kernels.cuda import choose

    monkeypatch.setattr(choose, "obstacle", lambda device: "libnvrtc.so.12 was not found")
    assert nc.which_kernel("int8", "cuda", operation="linear") == "triton"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", CODECS)
def test_it_says_cuda_exactly_where_a_product_goes_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowcast.kernels.cuda import choose

    for launch in ("launch_cut", "launch_ring", "launch_slices"):
        monkeypatch.setattr(choose, launch, lambda *arguments: None)
    monkeypatch.setattr(choose, "_compiles", lambda device: True)
    monkeypatch.setattr(choose, "_processors", lambda device: 132)
    monkeypatch.setattr(choose, "_chip", lambda device: (227 << 10, True))
    codec = CODECS[name]
    numel = 3072  # a multiple of every block in the table
    x, data = torch.ones(1, numel, dtype=torch.bfloat16), torch.zeros(16, codec.row_bytes(numel), dtype=torch.uint8)
    taken = choose.linear(torch.empty(1, 16, dtype=x.dtype), x, data, codec.recipe(torch.device("cpu")), None)
    assert nc.which_kernel(codec, "cuda", operation="linear") == ("cuda" if taken else "triton")


@pytest.mark.usefixtures("gpu")
def test_on_hopper_sums_of_4_bit_codes_and_of_signs_run_in_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowcast.kernels.cuda import signs, sums

    specs = ("int4", "nf4", "apot4", "sign", "int8", "int4:block=96", "int4:stochastic=true", "sign:block=128")
    for hopper in (True, False):
        for module in (sums, signs):
            monkeypatch.setattr(module, "runs_on", lambda device, hopper=hopper: hopper)
        answers = [nc.which_kernel(spec, "cuda", operation="decode_sum_encode") for spec in specs]
        assert answers == ["cuda" if hopper else "triton"] * 4 + ["triton"] * 4
