"""What collectives refuse: before anything is sent, with a message that names the argument and the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

import narrowcast
from narrowcast import distributed as ncd
from narrowcast import errors
from narrowcast.distributed import arguments

X = torch.ones(4)
F = ncd.functional


def _nested() -> torch.Tensor:
    return torch.nested.nested_tensor([X, X], layout=torch.strided)


# What is called in a group of two, the error, and words that its message holds.
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "whole numbers": (lambda: ncd.all_reduce(torch.ones(4).int()), errors.DtypeError, ["tensor:", "int32", ".float()"]),
    "complex numbers": (
        lambda: ncd.all_reduce(torch.ones(4) * 1j),
        errors.DtypeError,
        ["tensor:", "complex64", "real"],
    ),
    "no tensor": (lambda: ncd.all_reduce([1.0]), errors.DtypeError, ["tensor:", "list"]),  # type: ignore[arg-type]
    "sparse": (lambda: ncd.all_reduce(torch.eye(4).to_sparse()), errors.DtypeError, ["tensor:", "to_dense()"]),
    "nested": (lambda: ncd.all_reduce(_nested()), errors.DtypeError, ["tensor:", "nested", "unbind()"]),
    "a DTensor": (
        lambda: ncd.all_reduce(distribute_tensor(X, init_device_mesh("cpu", (2,)))),
        errors.DtypeError,
        ["tensor:", "DTensor", "tensor.to_local()", "tensor.full_tensor()"],
    ),
    "unknown codec": (lambda: ncd.all_reduce(X, codec="int9"), errors.SpecError, ["int9"]),
    "seed": (lambda: ncd.all_reduce(X, codec="int4:stochastic=true", seed="a"), errors.SpecError, ["seed='a'"]),  # type: ignore[arg-type]
    "no group": (lambda: ncd.all_reduce(X, group="world"), errors.ShapeError, ["group:", "ProcessGroup", "str"]),  # type: ignore[arg-type]
    "expanded": (lambda: ncd.all_reduce(torch.ones(1).expand(4)), errors.ShapeError, ["share memory", "clone()"]),
    **{
        f"all_reduce {op}": (
            lambda op=op: ncd.all_reduce(X, op),  # type: ignore[misc]
            errors.SpecError,
            [f"op={op}", "SUM", "AVG", "no bound on their error", "torch.distributed"],
        )
        for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT, dist.ReduceOp.BAND)
    },
    "a codec for op": (
        lambda: ncd.all_reduce(X, "int8"),
        errors.SpecError,
        ["op=int8: ", "Did you mean codec='int8'?"],
    ),
    "a codec object for op": (
        lambda: ncd.all_reduce(X, narrowcast.codec("int4:block=32")),
        errors.SpecError,
        ["Did you mean codec='int4:block=32'?"],
    ),
    "a mapping for op": (
        lambda: ncd.all_reduce(X, {"name": "int4"}),
        errors.SpecError,
        ["Did you mean codec={'name': 'int4'}?"],
    ),
    "a codec for op over a mesh": (
        lambda: ncd.all_reduce(X, "nf4", init_device_mesh("cpu", (1, 2))),
        errors.SpecError,
        ["Did you mean codec='nf4'?"],
    ),
    "a codec for op of reduce_scatter": (
        lambda: ncd.reduce_scatter(X, [X, X], "bf16"),
        errors.SpecError,
        ["Did you mean codec='bf16'?"],
    ),
    "a codec for op of reduce_scatter_tensor": (
        lambda: ncd.reduce_scatter_tensor(X, torch.ones(8), "int8"),
        errors.SpecError,
        ["Did you mean codec='int8'?"],
    ),
    "a codec for op, functional": (
        lambda: F.all_reduce(X, "int8"),
        errors.SpecError,
        ["Did you mean codec='int8'?"],
    ),
    "a codec for op of a functional reduce_scatter": (
        lambda: F.reduce_scatter(X, "int8"),
        errors.SpecError,
        ["Did you mean codec='int8'?"],
    ),
    "a codec for a group": (
        lambda: ncd.all_gather([X, X], X, "int8"),  # type: ignore[arg-type]
        errors.ShapeError,
        ["group:", "ProcessGroup", "str", "Did you mean codec='int8'?"],
    ),
    "a codec for a source": (
        lambda: ncd.broadcast(X, "int8"),  # type: ignore[arg-type]
        errors.ShapeError,
        ["src='int8': not a rank", "Did you mean codec='int8'?"],
    ),
    "a codec for a destination": (
        lambda: ncd.send(X, "int8"),  # type: ignore[arg-type]
        errors.ShapeError,
        ["dst='int8': not a rank", "Did you mean codec='int8'?"],
    ),
    "reduce_scatter MAX": (
        lambda: ncd.reduce_scatter(X, [X, X], dist.ReduceOp.MAX),
        errors.SpecError,
        ["reduce_scatter", "SUM"],
    ),
    "reduce_scatter_tensor MIN": (
        lambda: ncd.reduce_scatter_tensor(X, torch.ones(8), dist.ReduceOp.MIN),
        errors.SpecError,
        ["reduce_scatter_tensor", "SUM"],
    ),
    "a list too short": (lambda: ncd.all_gather([X], X), errors.ShapeError, ["tensor_list", "2 ranks", "1 tensors"]),
    "a list too long": (
        lambda: ncd.reduce_scatter(X, [X, X, X]),
        errors.ShapeError,
        ["input_list", "2 ranks", "3 tensors"],
    ),
    "a tensor for a list": (lambda: ncd.all_gather(torch.ones(2, 4), X), errors.DtypeError, ["tensor_list", "a list"]),  # type: ignore[arg-type]
    "lists of two dtypes": (
        lambda: ncd.all_to_all([X, X.half()], [X, X]),
        errors.DtypeError,
        ["output_tensor_list[1]", "float16", "float32", ".to()"],
    ),
    "input and output of two dtypes": (
        lambda: ncd.all_gather_into_tensor(torch.ones(8).half(), X),
        errors.DtypeError,
        ["input", "output", "float16", ".to()"],
    ),
    "whole numbers in a list": (
        lambda: ncd.all_to_all([X, X], [X, X.long()]),
        errors.DtypeError,
        ["input_tensor_list[1]", "int64"],
    ),
    "all_gather numel": (
        lambda: ncd.all_gather([torch.ones(5), torch.ones(5)], X),
        errors.ShapeError,
        ["has 5 elements, needs 4", "as many as tensor"],
    ),
    "all_gather_into_tensor numel": (
        lambda: ncd.all_gather_into_tensor(torch.ones(9), X),
        errors.ShapeError,
        ["output", "has 9 elements, needs 8", "2 ranks"],
    ),
    "reduce_scatter numel": (
        lambda: ncd.reduce_scatter(torch.ones(3), [X, X]),
        errors.ShapeError,
        ["input_list", "has 4 elements, needs 3", "as many as output"],
    ),
    "reduce_scatter_tensor numel": (
        lambda: ncd.reduce_scatter_tensor(X, torch.ones(7)),
        errors.ShapeError,
        ["input", "has 7 elements, needs 8", "2 ranks"],
    ),
    "all_to_all own piece": (
        lambda: ncd.all_to_all([X, X], [torch.ones(3), torch.ones(3)]),
        errors.ShapeError,
        ["itself", "has 4 elements, needs 3"],
    ),
    "odd rows without splits": (
        lambda: ncd.all_to_all_single(torch.ones(3), torch.ones(3)),
        errors.ShapeError,
        ["first dimension is 3", "2 ranks", "input_split_sizes=[...]"],
    ),
    "split sum": (
        lambda: ncd.all_to_all_single(X, X, [2, 2], [1, 2]),
        errors.ShapeError,
        ["input_split_sizes=[1, 2]", "adds up to 3", "is 4"],
    ),
    "output split sum": (
        lambda: ncd.all_to_all_single(X, X, [2, 4], [2, 2]),
        errors.ShapeError,
        ["output_split_sizes=[2, 4]", "adds up to 6", "is 4"],
    ),
    "split count": (
        lambda: ncd.all_to_all_single(X, X, [2, 2], [4]),
        errors.ShapeError,
        ["input_split_sizes=[4]", "expected 2 sizes"],
    ),
    "negative split": (
        lambda: ncd.all_to_all_single(X, X, [5, -1], [2, 2]),
        errors.ShapeError,
        ["output_split_sizes=[5, -1]", "zero or more"],
    ),
    "broken split": (
        lambda: ncd.all_to_all_single(X, X, [1.5, 2.5], [2, 2]),  # type: ignore[list-item]
        errors.ShapeError,
        ["output_split_sizes=[1.5, 2.5]", "whole numbers"],
    ),
    "rows of two lengths": (
        lambda: ncd.all_gather([torch.ones(2, 2)] * 2, X, codec="int8:block=row"),
        errors.ShapeError,
        ["int8:block=row", "elements", ".view()"],
    ),
    "rows of two lengths in all_to_all_single": (
        lambda: ncd.all_to_all_single(torch.ones(4, 2), torch.ones(2, 4), codec="int8:block=row"),
        errors.ShapeError,
        ["int8:block=row", "elements", ".view()"],
    ),
    "src": (lambda: ncd.broadcast(X, 2), errors.ShapeError, ["src=2", "not a rank of this group", "[0, 1]"]),
    "no src": (lambda: ncd.broadcast(X), errors.ShapeError, ["src=None", "group_src=None", "one of the two"]),
    "src twice": (lambda: ncd.broadcast(X, 0, group_src=0), errors.ShapeError, ["one of the two"]),
    "group_src": (lambda: ncd.broadcast(X, group_src=5), errors.ShapeError, ["group_src=5", "0 to 1"]),
    "dst": (lambda: ncd.send(X, 7), errors.ShapeError, ["dst=7", "[0, 1]"]),
    "dst itself": (lambda: ncd.send(X, dist.get_rank()), errors.ShapeError, ["dst:", "this rank itself", "copy"]),
    "src itself": (lambda: ncd.irecv(X, dist.get_rank()), errors.ShapeError, ["src:", "this rank itself", "copy"]),
    "any source": (lambda: ncd.recv(X), errors.ShapeError, ["src=None", "Pass src="]),
    "negative tag": (lambda: ncd.send(X, 1 - dist.get_rank(), tag=-1), errors.ShapeError, ["tag=-1", "zero or more"]),
    "broken tag": (lambda: ncd.irecv(X, 1 - dist.get_rank(), tag=0.5), errors.ShapeError, ["tag=0.5", "integer"]),  # type: ignore[arg-type]
    "1-D mesh": (
        lambda: ncd.all_reduce(X, group=init_device_mesh("cpu", (2,))),
        errors.ShapeError,
        ["group:", "hosts x local", "init_device_mesh"],
    ),
    "3-D mesh": (
        lambda: ncd.all_reduce(X, group=init_device_mesh("cpu", (1, 2, 1))),
        errors.ShapeError,
        ["group:", "not 3", "hosts x local"],
    ),
    "mesh MAX": (
        lambda: ncd.all_reduce(X, dist.ReduceOp.MAX, init_device_mesh("cpu", (1, 2))),
        errors.SpecError,
        ["SUM", "AVG"],
    ),
    "functional MAX": (lambda: F.all_reduce(X, dist.ReduceOp.MAX), errors.SpecError, ["SUM", "AVG"]),
    "functional numbers": (lambda: F.all_gather(X.int()), errors.DtypeError, ["tensor:", "int32"]),
    "functional list": (lambda: F.all_reduce([X]), errors.DtypeError, ["tensor:", "list"]),  # type: ignore[arg-type]
    "functional dim": (lambda: F.all_gather(X, dim=1), errors.ShapeError, ["dim=1", "1 dimensions"]),
    "functional odd": (
        lambda: F.reduce_scatter(torch.ones(4, 3), dim=1),
        errors.ShapeError,
        ["tensor: dimension 1 is 3", "2 ranks", "Pad"],
    ),
    "functional splits": (
        lambda: F.all_to_all_single(X, [2, 2], [3, 2]),
        errors.ShapeError,
        ["input_split_sizes=[3, 2]", "adds up to 5"],
    ),
    "functional backward codec": (lambda: F.all_reduce(X, backward_codec="int9"), errors.SpecError, ["int9"]),
}


def refusals(rank: int) -> dict[str, str]:
    dist.barrier()
    failed = {}
    for name, (call, kind, words) in REFUSED.items():
        try:
            call()
            failed[name] = "was accepted"
        except Exception as error:
            missing = [word for word in words if word not in str(error)]
            if not isinstance(error, kind) or missing:
                failed[name] = f"{error!r} lacks {missing}"
    ncd.all_reduce(torch.ones(4))  # and the group is as good as before
    return failed


def test_wrong_arguments_are_refused_in_words_that_name_them_and_the_fix() -> None:
    assert run(2, refusals) == [{}, {}]


@pytest.mark.parametrize("op", ["max", "int44", "levels", None, 3, dist.ReduceOp.MAX])
def test_what_is_no_codec_is_not_taken_for_one(op: object) -> None:
    with pytest.raises(errors.SpecError, match=f"^op={op}: ") as raised:
        arguments.reduction(op, 2, "all_reduce")
    assert "Did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ncd.all_reduce(X),
        lambda: ncd.all_gather([X], X),
        lambda: ncd.broadcast(X, 0),
        lambda: ncd.isend(X, 1),
        lambda: ncd.recv(X, 0),
        lambda: F.all_to_all_single(X),
    ],
)
def test_without_a_process_group_the_error_says_how_to_make_one(call: Callable[[], Any]) -> None:
    with pytest.raises(errors.CollectiveError, match=r"no process group yet.*init_process_group\(\).*torchrun"):
        call()


def outsiders(rank: int) -> str:
    group = dist.new_group([0, 1])
    if rank < 2:
        F.all_reduce(X, group=group)
        return ""
    with pytest.raises(errors.CollectiveError, match="not in the group") as raised:
        F.all_reduce(X, group=group)
    return str(raised.value)


def test_a_functional_collective_has_no_result_outside_of_its_group_and_says_so() -> None:
    assert "Call it on members only" in run(3, outsiders)[2]
