"""narrowcast.compat.quantization: code that was written for PyTorch's file runs, with any codec and collective."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import model
import pytest
import torch
import torch.distributed as dist
from ranks import run

import narrowcast as nc
from narrowcast import compat, errors
from narrowcast import distributed as ncd
from narrowcast.compat import quantization as ours
from narrowcast.compat.quantization import DQuantType, auto_quantize


def test_modules_of_compat_are_loaded_when_named_and_others_are_refused_with_a_list() -> None:
    code = (
        "import sys; from narrowcast import compat;"
        "assert not [name for name in sys.modules if name.startswith('narrowcast.compat.')];"
        "print(compat.quantization.DQuantType.FP16)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert (done.stdout, done.stderr) == ("fp16\n", "")
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'\. There are: apot, gpt_fast, quantization"):
        _ = compat.nothing


# -- the same calls as PyTorch's tests make ----------------------------------------------------------------------------


def as_pytorchs_tests_call_it(rank: int, world: int) -> None:
    group = dist.new_group(range(world))
    for qtype in DQuantType:
        for size in range(1, world + 1):
            outputs = [torch.full((size, size), -1.0) for _ in range(world)]
            all_gather = auto_quantize(dist.all_gather, qtype, quant_loss=None)
            assert all_gather(outputs, torch.full((size, size), float(rank)), group=group, async_op=False) is None
            assert [output.unique().tolist() for output in outputs] == [[float(peer)] for peer in range(world)]

        inputs = [torch.full((peer + 1, world), float(rank)) for peer in range(world)]
        outputs = [torch.ones(rank + 1, world) for _ in range(world)]
        auto_quantize(dist.all_to_all, qtype, quant_loss=None)(outputs, inputs, group=group)
        assert [output.unique().tolist() for output in outputs] == [[float(peer)] for peer in range(world)]

        in_splits, out_splits = [peer + 1 for peer in range(world)], [rank + 1] * world
        output, x = torch.ones((rank + 1) * world, world), torch.full((sum(in_splits), world), float(rank))
        all_to_all_single = auto_quantize(dist.all_to_all_single, qtype, quant_loss=None)
        all_to_all_single(output, x, out_splits=out_splits, in_splits=in_splits, group=group)
        assert torch.equal(output, torch.arange(float(world)).repeat_interleave(rank + 1)[:, None].expand(-1, world))


@pytest.mark.parametrize("world", [1, 3])
def test_calls_as_pytorchs_tests_make_them_give_what_those_expect(world: int) -> None:
    run(world, as_pytorchs_tests_call_it, world)


# -- every collective --------------------------------------------------------------------------------------------------

NAMES = sorted(set(ours._COLLECTIVES.values()))


def sample(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def call(name: str, rank: int, collective: Callable[..., Any], **options: Any) -> list[torch.Tensor]:
    """Call a collective of the given name on three ranks as torch takes it; the tensors it has written."""
    x, next_, last = sample(rank, 3, 40), (rank + 1) % 3, (rank - 1) % 3
    lists = [torch.zeros(3, 40) for _ in range(3)]
    out, wide = torch.zeros(3, 40), torch.zeros(9, 40)
    if name in ("all_reduce", "broadcast"):
        collective(x, *([1] if name == "broadcast" else []), **options)
        return [x]
    if name == "all_gather":
        collective(lists, x, **options)
        return lists
    if name == "all_gather_into_tensor":
        collective(wide, x, **options)
        return [wide]
    if name in ("reduce_scatter", "all_to_all"):
        inputs = [x + peer for peer in range(3)]
        collective(lists if name == "all_to_all" else out, inputs, **options)
        return lists if name == "all_to_all" else [out]
    if name == "reduce_scatter_tensor":
        collective(out, sample(rank, 9, 40), **options)
        return [out]
    if name == "all_to_all_single":
        collective(out, x, **options)
        return [out]
    # Point to point: this rank plays its side, the library itself the other.
    other = {"send": ncd.irecv, "isend": ncd.irecv, "recv": ncd.isend, "irecv": ncd.isend}[name]
    codec = options.pop("codec", "int4")
    mine = {"codec": codec} if collective is getattr(ncd, name) else {}
    received = out if "recv" in name else lists[0]
    peers = (last, next_) if "recv" in name else (next_, last)
    pending = other(x if "recv" in name else received, peers[1], codec=codec)
    work = collective(received if "recv" in name else x, peers[0], **mine)
    for one in (pending, work if name[0] == "i" else None):
        if one is not None:
            one.wait()
    return [received]


def other_dtypes(rank: int) -> None:
    """Integers, and inputs and outputs of several dtypes, as PyTorch's takes them."""
    for async_op in (False, True):
        outputs = [torch.full((2, 3), -1) for _ in range(3)]
        work = auto_quantize(dist.all_gather, DQuantType.FP16, 0.5)(
            outputs, torch.full((2, 3), rank), async_op=async_op
        )
        if async_op:
            work.wait()
        assert [output.unique().tolist() for output in outputs] == [[0], [2], [4]]
        assert {output.dtype for output in outputs} == {torch.int64}
        x, halves = sample(rank, 4), [torch.zeros(4, dtype=torch.float16) for _ in range(3)]
        auto_quantize(dist.all_gather, DQuantType.FP16)(halves, x)
        assert [half.dtype for half in halves] == [torch.float16] * 3
        assert all(torch.equal(half, sample(peer, 4).half()) for peer, half in enumerate(halves))
        small = torch.full((5,), 100, dtype=torch.int8)
        auto_quantize(dist.all_reduce, "fp16")(small)
        assert small.tolist() == [127] * 5  # 300 is the nearest there is
        single = torch.zeros(3, dtype=torch.int32)
        auto_quantize(dist.all_to_all_single, "bfp16")(single, torch.arange(3) + 10 * rank)
        assert single.tolist() == [rank, 10 + rank, 20 + rank]


def all_of_them(rank: int) -> None:
    other_dtypes(rank)
    for name in NAMES:
        expected = call(name, rank, getattr(ncd, name), codec="int4")
        for func in (getattr(dist, name), getattr(ncd, name)):
            found = call(name, rank, auto_quantize(func, "int4"))
            assert all(map(torch.equal, found, expected)), name
            found = call(name, rank, auto_quantize(func, "int4", 4.0))  # dividing by 4 is exact
            divisor = 1.0 if "send" in name else 4.0
            assert all(torch.equal(a, b / divisor) for a, b in zip(found, expected, strict=True)), name


def test_every_collective_is_the_librarys_own_with_its_results_divided() -> None:
    run(3, all_of_them)


@pytest.mark.parametrize("name", [name for name in ours._COLLECTIVES if hasattr(dist, name)])
def test_torch_and_the_library_agree_on_the_order_of_arguments(name: str) -> None:
    def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
        found = inspect.signature(function).parameters.values()
        return [each for each in found if each.kind is not inspect.Parameter.KEYWORD_ONLY]

    theirs, own = parameters(getattr(dist, name)), parameters(getattr(ncd, ours._COLLECTIVES[name]))
    assert [each.default for each in theirs] == [each.default for each in own]
    assert [each.name.removesuffix("_tensor") for each in theirs] == [each.name for each in own]


@pytest.mark.parametrize("func", [dist.all_gather, ncd.all_to_all_single, ncd.functional.all_reduce])
def test_a_quantized_collective_looks_like_the_one_it_stands_for(func: Callable[..., Any]) -> None:
    made = auto_quantize(func, DQuantType.FP16)
    assert made.__name__ == func.__name__
    assert inspect.signature(made) == inspect.signature(func)


@pytest.mark.parametrize("qtype", [DQuantType.BFP16, "bfp16", "bf16", nc.codec("bf16"), {"name": "bf16"}])
def test_a_qtype_is_a_dquanttype_or_whatever_names_a_codec(qtype: Any) -> None:
    assert ours.codec_of(qtype) == nc.codec("bf16")


def test_pytorchs_own_dquanttype_is_understood() -> None:
    from torch.distributed.algorithms._quantization import quantization as theirs

    assert [ours.codec_of(qtype).spec for qtype in theirs.DQuantType] == ["fp16", "bf16"]


# -- asynchronous, and in groups ---------------------------------------------------------------------------------------


def in_flight(rank: int) -> None:
    """Twenty collectives at once, each result divided before its Work is done or its future calls back."""
    all_reduce = auto_quantize(dist.all_reduce, "raw", quant_loss=0.25)
    tensors = [torch.full((1000 * i + 1,), rank + i + 0.0) for i in range(20)]
    works = [all_reduce(x, async_op=True) for x in tensors]
    seen = [work.get_future().then(lambda done: done.value()[0].clone()) for work in works[::2]]
    for i, (work, x) in reversed(list(enumerate(zip(works, tensors, strict=True)))):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert x.unique().tolist() == [4 * (1.0 + 2 * i)]
        assert work.result()[0] is x
    for i, future in enumerate(seen):
        assert future.wait().unique().tolist() == [4 * (1.0 + 4 * i)]


def test_a_work_with_quant_loss_is_done_when_its_results_are_divided() -> None:
    run(2, in_flight)


def disagree(rank: int) -> None:
    gather = auto_quantize(dist.all_gather, ["int8", "int4"][rank], 2.0)
    work = gather([torch.ones(4), torch.ones(4)], torch.ones(4), async_op=True)
    with pytest.raises(errors.MismatchError, match="int4"):
        work.wait()
    assert not work.is_success()


def test_an_error_comes_out_of_a_work_with_quant_loss_as_what_it_is() -> None:
    run(2, disagree)


def from_outside(rank: int) -> None:
    group, x = dist.new_group([0]), torch.full((3,), 8.0)
    all_reduce = auto_quantize(dist.all_reduce, "int8", 2.0)
    assert all_reduce(x, group=group) is None
    assert (all_reduce(x, group=group, async_op=True) is None) == (rank == 1)
    if rank == 1:
        assert auto_quantize(dist.recv, "int8", 2.0)(x, 0, group) == -1
        assert x.tolist() == [8.0] * 3


def test_a_rank_outside_of_the_group_keeps_its_tensors() -> None:
    run(2, from_outside)


def over_a_mesh(rank: int) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 1))
    x = torch.full((3,), 1.0)
    auto_quantize(ncd.all_reduce, "fp16", 2.0)(x, group=mesh, local_codec="raw")
    assert x.tolist() == [1.0] * 3


def test_what_the_librarys_own_collectives_take_besides_is_passed_on() -> None:
    run(2, over_a_mesh)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("func", [dist.gather, dist.barrier, print, "all_gather", None])
def test_a_function_that_is_no_collective_of_ours_is_refused_with_a_list_of_those(func: Any) -> None:
    with pytest.raises(
        errors.SpecError, match=r"func=.*all_reduce, all_gather.*irecv.*functional.*auto_quantize\(dist"
    ) as refused:
        auto_quantize(func, DQuantType.FP16)
    assert isinstance(refused.value, RuntimeError)  # as PyTorch documents it


def without_tensors(rank: int) -> None:
    gather = auto_quantize(dist.all_gather, DQuantType.FP16)
    outs = [torch.zeros(3) for _ in range(2)]
    with pytest.raises(RuntimeError, match=r"tensor: expected a torch\.Tensor, got list"):  # as PyTorch documents it
        gather(outs, [1.0, 2.0, 3.0])
    with pytest.raises(RuntimeError, match="tensor_list: expected a list of tensors"):
        gather(torch.zeros(3), torch.ones(3))
    gather(outs, torch.full((3,), float(rank)))
    assert [out.tolist() for out in outs] == [[0.0] * 3, [1.0] * 3]


def test_what_is_no_tensor_is_refused_with_a_runtime_error_and_the_next_call_works() -> None:
    run(2, without_tensors)


def test_functions_of_the_same_name_that_take_other_arguments_are_refused() -> None:
    import torch.distributed.nn.functional as theirs

    with pytest.raises(errors.SpecError, match=r"func=all_gather.*narrowcast.distributed.functional"):
        auto_quantize(theirs.all_gather, DQuantType.FP16)


@pytest.mark.parametrize(("qtype", "word"), [("int9", "int9"), (None, "None"), (torch.float16, "float16")])
def test_a_qtype_that_is_none_is_refused_with_what_there_is(qtype: Any, word: str) -> None:
    with pytest.raises(
        errors.SpecError, match=f"qtype: expected DQuantType.FP16, DQuantType.BFP16, or a codec.*{word}"
    ):
        auto_quantize(dist.all_gather, qtype)


@pytest.mark.parametrize("loss", [0, 0.0, torch.nan, torch.inf, True, "1.0"])
def test_a_quant_loss_that_nothing_can_be_divided_by_is_refused(loss: Any) -> None:
    with pytest.raises(errors.SpecError, match=rf"quant_loss={loss!r}: results are divided by it.*Pass 1\.02"):
        auto_quantize(dist.all_gather, DQuantType.FP16, loss)


def test_a_wrong_call_is_refused_as_python_does_with_the_name_of_the_collective() -> None:
    with pytest.raises(TypeError, match=r"all_gather\(\): missing a required argument: 'tensor'"):
        auto_quantize(dist.all_gather, DQuantType.FP16)([])
    with pytest.raises(TypeError, match=r"all_gather\(\): got an unexpected keyword argument 'out_splits'"):
        auto_quantize(dist.all_gather, DQuantType.FP16)([], torch.ones(1), out_splits=[1])
    with pytest.raises(errors.SpecError, match=r"codec='int8': all_reduce travels in the qtype.*Drop"):
        auto_quantize(ncd.all_reduce, DQuantType.FP16)(torch.ones(1), codec="int8")
    x = torch.ones(1)
    with pytest.raises(errors.SpecError, match=r"out_splits is another name of output_split_sizes.*each once"):
        auto_quantize(dist.all_to_all_single, DQuantType.FP16)(x, x, out_splits=[1], output_split_sizes=[1])


# -- PyTorch's own conversions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (2, 3, 4)])
def test_fp16_and_bfp16_are_the_casts_of_torch_under_the_dtype_float16(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = sample(0, *shape).to(dtype)
    for qtype, cast in ((DQuantType.FP16, torch.float16), (DQuantType.BFP16, torch.bfloat16)):
        halves = ours._quantize_tensor(x, qtype)
        assert halves.dtype == torch.float16
        assert torch.equal(halves.view(cast), x.float().to(cast))
        back = ours._dequantize_tensor(halves, qtype)
        assert back.dtype == torch.float32
        assert torch.equal(back, x.float().to(cast).float())
        assert torch.equal(ours._dequantize_tensor(halves, qtype, 0.5), back * 2)


def test_bfp16_has_pytorchs_bits_but_for_exact_ties() -> None:
    x = sample(1, 64, 64)
    theirs = torch.ops.quantization._FloatToBfloat16Quantized(x)
    tie = x.view(torch.int32) & 0xFFFF == 0x8000
    found = ours._quantize_tensor(x, DQuantType.BFP16)
    assert torch.equal(found.view(torch.int16)[~tie], theirs.view(torch.int16)[~tie])


def test_lists_are_converted_one_by_one() -> None:
    tensors = [sample(rank, 2, rank) for rank in range(3)]
    halves = ours._quantize_tensor_list(tensors, DQuantType.FP16)
    back = ours._dequantize_tensor_list(halves, DQuantType.FP16, quant_loss=0.5)
    assert all(torch.equal(b, 2 * x.half().float()) for b, x in zip(back, tensors, strict=True))


def test_a_clamp_is_for_finite_numbers() -> None:
    x = torch.tensor([70000.0, -70000.0, torch.inf, -torch.inf, torch.nan, 1.0])
    top = ours.TORCH_HALF_MAX
    assert ours.TORCH_HALF_MIN == -top == -65504.0
    assert ours._fp32_to_fp16_with_clamp(x)[:4].tolist() == [top, -top, torch.inf, -torch.inf]
    assert ours._fp32_to_fp16_with_clamp(x)[4].isnan()


def test_conversions_refuse_what_they_cannot_take_in_words_that_help() -> None:
    with pytest.raises(errors.DtypeError, match=r"tensor: expected a torch.Tensor, got list"):
        ours._quantize_tensor([1.0], DQuantType.FP16)  # type: ignore[arg-type]
    with pytest.raises(errors.DtypeError, match=r"tensor: expected float16, got torch.float32.*_quantize_tensor"):
        ours._dequantize_tensor(torch.ones(3), DQuantType.BFP16)
    with pytest.raises(errors.DtypeError, match="tensor_list: expected a list of tensors, got Tensor"):
        ours._quantize_tensor_list(torch.ones(3), DQuantType.FP16)  # type: ignore[arg-type]
    with pytest.raises(errors.DtypeError, match=r"tensor_list\[1\].*int64"):
        ours._dequantize_tensor_list([torch.ones(1).half(), torch.ones(1).long()], DQuantType.FP16)
    with pytest.raises(errors.SpecError, match=r"qtype=int8: these functions give 16 bits.*narrowcast\.encode"):
        ours._quantize_tensor(torch.ones(3), "int8")
    for wrong in (lambda: ours._quantize_tensor("x", "fp16"), lambda: ours._quantize_tensor(torch.ones(1), "int8")):
        with pytest.raises(RuntimeError):
            wrong()
    with pytest.raises(RuntimeError, match=r"tensor: expected floats or integers, got torch\.bool"):
        ours._quantize_tensor(torch.ones(3).bool(), DQuantType.FP16)
    assert ours._quantize_tensor(torch.tensor([3, -70000]), DQuantType.FP16).tolist() == [3.0, -65504.0]


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def on_cuda(rank: int) -> None:
    everyone = [sample(peer, 1000) for peer in range(2)]
    expected = model.all_reduce(nc.codec("int8"), everyone) / 4
    for async_op in (False, True):
        x = everyone[rank].cuda()
        torch.cuda._sleep(20_000_000)
        work = auto_quantize(dist.all_reduce, "int8", 4.0)(x, async_op=async_op)
        if async_op:
            assert work.wait()
        assert torch.equal(x.cpu(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_results_on_a_gpu_are_divided_in_the_order_of_streams() -> None:
    run(2, on_cuda, timeout=200, group_timeout=100)
