"""What PyTorch's quantization.py gets wrong.

Each function marked `right` says what should hold of a module with PyTorch's names, on one of two ranks. All of them
hold here, and none of them holds for PyTorch's own module: both are run.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch.utils._python_dispatch import TorchDispatchMode

from narrowcast import distributed as ncd
from narrowcast.compat import quantization as ours

Right = Callable[[Any, int], None]
RIGHT: dict[str, Right] = {}


def right(check: Right) -> Right:
    RIGHT[check.__name__] = check
    return check


@right
def a_dquanttype_has_a_word(quant: Any, rank: int) -> None:
    assert str(quant.DQuantType.FP16) == "fp16"


@right
def a_word_has_a_dquanttype(quant: Any, rank: int) -> None:
    assert quant.DQuantType("fp16") is quant.DQuantType.FP16


@right
def quant_loss_divides_the_results_of_lists(quant: Any, rank: int) -> None:
    outputs = [torch.zeros(2, 3), torch.zeros(2, 3)]
    quant.auto_quantize(dist.all_gather, quant.DQuantType.FP16, quant_loss=0.5)(outputs, torch.full((2, 3), rank + 1.0))
    assert [output[0, 0].item() for output in outputs] == [2.0, 4.0]


@right
def quant_loss_divides_bfp16(quant: Any, rank: int) -> None:
    halves = quant._quantize_tensor(torch.ones(2, 2), quant.DQuantType.BFP16)
    assert quant._dequantize_tensor(halves, quant.DQuantType.BFP16, 0.5).tolist() == [[2.0, 2.0], [2.0, 2.0]]


@right
def results_are_in_the_callers_memory(quant: Any, rank: int) -> None:
    buffer = torch.zeros(2, 4)
    quant.auto_quantize(dist.all_gather, quant.DQuantType.FP16)(list(buffer), torch.full((4,), rank + 1.0))
    assert buffer.tolist() == [[1.0] * 4, [2.0] * 4]


@right
def a_tuple_of_buffers_will_do(quant: Any, rank: int) -> None:
    buffers = torch.zeros(2, 4).unbind()
    quant.auto_quantize(dist.all_gather, quant.DQuantType.FP16)(buffers, torch.full((4,), rank + 1.0))
    assert [buffer[0].item() for buffer in buffers] == [1.0, 2.0]


SENT, EXPECTED = ([1, 3], [2, 2]), ([1, 2], [3, 2])
"""How many rows each rank sends to each, and expects from each."""


def unevenly(rank: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The output, the input, and what the output must be."""
    x = torch.arange(4.0) + 10 * rank
    return torch.zeros(sum(EXPECTED[rank])), x, [[0, 10, 11], [1, 2, 3, 12, 13]][rank]


@right
def split_sizes_have_torchs_names(quant: Any, rank: int) -> None:
    output, x, expected = unevenly(rank)
    splits = {"output_split_sizes": EXPECTED[rank], "input_split_sizes": SENT[rank]}
    quant.auto_quantize(dist.all_to_all_single, quant.DQuantType.FP16)(output, x, **splits)
    assert output.tolist() == expected


@right
def split_sizes_go_by_position(quant: Any, rank: int) -> None:
    x = torch.arange(4.0) + 10 * rank
    output = torch.zeros(4)
    splits = [[1, 3], [3, 1]][rank]  # both ways, and as many rows as even pieces have: PyTorch's swaps even ones
    quant.auto_quantize(dist.all_to_all_single, quant.DQuantType.FP16)(output, x, splits, splits)
    assert output.tolist() == [[0, 10, 11, 12], [1, 2, 3, 13]][rank]


@right
def a_group_goes_by_position(quant: Any, rank: int) -> None:
    alone = [dist.new_group([peer]) for peer in range(2)][rank]
    output = [torch.zeros(4)]
    quant.auto_quantize(dist.all_gather, quant.DQuantType.FP16)(output, torch.full((4,), rank + 1.0), alone)
    assert output[0].tolist() == [rank + 1.0] * 4


@right
def async_op_returns_a_work(quant: Any, rank: int) -> None:
    outputs = [torch.zeros(4), torch.zeros(4)]
    all_gather = quant.auto_quantize(dist.all_gather, quant.DQuantType.FP16)
    assert all_gather(outputs, torch.full((4,), rank + 1.0), async_op=True).wait()
    assert [output[0].item() for output in outputs] == [1.0, 2.0]


@right
def async_op_goes_by_position(quant: Any, rank: int) -> None:
    outputs = [torch.zeros(4), torch.zeros(4)]
    all_gather = quant.auto_quantize(dist.all_gather, quant.DQuantType.FP16)
    assert all_gather(outputs, torch.full((4,), rank + 1.0), None, True).wait()


@right
def other_collectives_work(quant: Any, rank: int) -> None:
    x = torch.full((4,), rank + 1.0)
    quant.auto_quantize(dist.all_reduce, quant.DQuantType.FP16)(x)
    assert x.tolist() == [3.0] * 4


@right
def other_codecs_work(quant: Any, rank: int) -> None:
    outputs = [torch.zeros(4), torch.zeros(4)]
    quant.auto_quantize(dist.all_gather, "int8")(outputs, torch.full((4,), rank + 1.0))
    assert [output[0].item() for output in outputs] == [1.0, 2.0]


@right
def results_keep_their_dtype(quant: Any, rank: int) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        outputs = [torch.zeros(4, dtype=dtype) for _ in range(2)]
        quant.auto_quantize(dist.all_gather, quant.DQuantType.FP16)(outputs, torch.full((4,), rank + 1.0, dtype=dtype))
        assert [output.dtype for output in outputs] == [dtype, dtype]


@right
def an_infinity_stays_one(quant: Any, rank: int) -> None:
    outputs = [torch.zeros(3), torch.zeros(3)]
    x = torch.tensor([torch.inf, -torch.inf, 1e6])
    quant.auto_quantize(dist.all_gather, quant.DQuantType.FP16)(outputs, x)
    assert outputs[1 - rank].tolist() == [torch.inf, -torch.inf, 65504.0]


@right
def bfp16_keeps_large_floats_finite(quant: Any, rank: int) -> None:
    halves = quant._quantize_tensor(torch.full((1, 1), 3.4e38), quant.DQuantType.BFP16)
    assert quant._dequantize_tensor(halves, quant.DQuantType.BFP16).isfinite().all()


@right
def bfp16_takes_one_to_many_dimensions(quant: Any, rank: int) -> None:
    for shape in ((), (5,), (2, 3), (2, 3, 4), (1, 2, 1, 2, 3)):
        outputs = [torch.zeros(shape), torch.zeros(shape)]
        quant.auto_quantize(dist.all_gather, quant.DQuantType.BFP16)(outputs, torch.full(shape, rank + 1.0))
        assert [output.flatten()[0].item() for output in outputs] == [1.0, 2.0]


class Reads(TorchDispatchMode):
    """Remembers the memory of every tensor that an operation read."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "clamp" in func.name() or "encode" in func.name():
            self.memory |= {x.data_ptr() for x in args if isinstance(x, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@right
def output_buffers_are_not_quantized(quant: Any, rank: int) -> None:
    outputs, x = [torch.zeros(64), torch.zeros(64)], torch.full((64,), rank + 1.0)
    buffers = list(outputs)
    with Reads() as reads:
        quant.auto_quantize(dist.all_gather, quant.DQuantType.FP16)(outputs, x)
    assert x.data_ptr() in reads.memory
    assert not reads.memory & {buffer.data_ptr() for buffer in buffers}


@right
def gradients_flow_through_the_functional_collectives(quant: Any, rank: int) -> None:
    x = torch.full((4,), rank + 1.0, requires_grad=True)
    gathered = quant.auto_quantize(ncd.functional.all_gather, quant.DQuantType.FP16, quant_loss=0.5)(x)
    (gathered * torch.arange(8.0)).sum().backward()
    assert gathered.tolist() == [2.0] * 4 + [4.0] * 4
    # Both ranks weigh this rank's elements with the same numbers, and quant_loss doubles them.
    assert x.grad is not None
    assert x.grad.tolist() == [2 * 2 * weight for weight in range(4 * rank, 4 * rank + 4)]


def what_holds(rank: int, theirs: bool) -> dict[str, str]:
    """Each sentence above, and why it does not hold: an empty string where it does."""
    quant: ModuleType = ours
    if theirs:
        from torch.distributed.algorithms._quantization import quantization as quant  # type: ignore[no-redef]
    found = {}
    for name, check in RIGHT.items():
        try:
            check(quant, rank)
            found[name] = ""
        except Exception as error:
            found[name] = repr(error) or "failed"
        # Not barrier(): in gloo it waits for the calls before it, and raises what one of them raised that still runs.
        dist.monitored_barrier()
    return found


@pytest.fixture(scope="module")
def here() -> list[dict[str, str]]:
    return run(2, what_holds, False)


@pytest.fixture(scope="module")
def there() -> list[dict[str, str]]:
    return run(2, what_holds, True)


@pytest.mark.parametrize("name", RIGHT)
def test_it_holds_here(name: str, here: list[dict[str, str]]) -> None:
    assert [rank[name] for rank in here] == ["", ""]


@pytest.mark.parametrize("name", RIGHT)
def test_it_does_not_hold_in_pytorchs_own(name: str, there: list[dict[str, str]]) -> None:
    assert any(rank[name] for rank in there)
