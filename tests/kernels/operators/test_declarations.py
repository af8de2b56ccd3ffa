"""An operation is declared once: whatever derives from the declaration, and whoever implements it, agrees with it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from narrowcast.kernels.contract import Kernel, Reference
from narrowcast.kernels.cpu.binding import Native
from narrowcast.kernels.layout import Grid
from narrowcast.kernels.operations import OPERATIONS, Operation
from narrowcast.kernels.operators.declare import schema_of

EVERY = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
SCHEMAS = {
    "encode": "(Tensor rows, int[] format, float peak, Tensor? table, int seed) -> Tensor",
    "encode_": "(Tensor(a!) out, Tensor rows, int[] format, float peak, Tensor? table, int seed) -> ()",
    "encode_searched": "(Tensor rows, Tensor? importance, float gain, int[] format, float peak, Tensor? table) "
    "-> Tensor",
    "encode_searched_": "(Tensor(a!) out, Tensor rows, Tensor? importance, float gain, int[] format, float peak, "
    "Tensor? table) -> ()",
    "decode": "(Tensor data, SymInt numel, ScalarType dtype, int[] format, float peak, Tensor? table) -> Tensor",
    "decode_": "(Tensor(a!) out, Tensor data, int[] format, float peak, Tensor? table) -> ()",
    "decode_sum": "(Tensor data, SymInt numel, ScalarType dtype, int[] format, float peak, Tensor? table, Tensor? own, "
    "int own_rank, int divisor) -> Tensor",
    "decode_sum_": "(Tensor(a!) out, Tensor data, int[] format, float peak, Tensor? table, Tensor? own, int own_rank, "
    "int divisor) -> ()",
    "decode_sum_encode": "(Tensor data, SymInt numel, int[] format, float peak, Tensor? table, Tensor? own, "
    "int own_rank, int divisor, int seed) -> Tensor",
    "decode_sum_encode_": "(Tensor(a!) out, Tensor data, SymInt numel, int[] format, float peak, Tensor? table, "
    "Tensor? own, int own_rank, int divisor, int seed) -> ()",
    "linear": "(Tensor x, Tensor data, int[] format, float peak, Tensor? table, Tensor? bias) -> Tensor",
    "linear_backward": "(Tensor grad, Tensor data, SymInt numel, int[] format, float peak, Tensor? table) -> Tensor",
    "integer_linear": "(Tensor x, Tensor weight) -> Tensor",
    "integer_conv": "(Tensor x, Tensor scale, Tensor levels, Tensor thresholds, bool uniform, Tensor weight, "
    "Tensor factor, Tensor? bias, int[] window) -> Tensor",
    "fake_quantize": "(Tensor x, Tensor scale, Tensor levels, Tensor thresholds, bool uniform, int axis) -> Tensor",
    "fake_quantize_backward": "(Tensor grad, Tensor x, Tensor scale, Tensor levels, Tensor thresholds, bool uniform, "
    "int axis) -> (Tensor, Tensor)",
}
"""As graphs and profiles show them. A graph that was exported holds these."""


def names(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


@EVERY
def test_a_meaning_and_its_check_take_the_same_arguments(operation: Operation[...]) -> None:
    assert names(operation.check) == names(operation.meaning)
    if operation.sized_by_out:
        assert names(operation.check)[1:3] == ["numel", "dtype"]


@EVERY
def test_every_machine_implements_it_with_what_is_written_first(operation: Operation[...]) -> None:
    machines: list[type[Kernel]] = [Native]
    if pytest.importorskip("triton", reason="Triton is not installed"):
        from narrowcast.kernels.triton.launch import Triton

        machines.append(Triton)
    for machine in machines:
        method = names(getattr(machine, f"_{operation.name}"))
        assert method == ["self", "out", *operation.without_sizes(tuple(names(operation.check)))], machine
    assert callable(getattr(Reference, f"_{operation.name}"))
    assert callable(getattr(Kernel, operation.name))


@pytest.mark.parametrize("name", SCHEMAS)
def test_operators_have_these_schemas(name: str) -> None:
    import narrowcast.kernels.operators.fake_quantize
    import narrowcast.kernels.operators.integer
    import narrowcast.kernels.operators.linear  # noqa: F401

    assert str(getattr(torch.ops.narrowcast, name).default._schema) == f"narrowcast::{name}{SCHEMAS[name]}"


def test_an_annotation_that_no_operator_can_have_is_refused() -> None:
    def takes_a_grid(grid: Grid) -> Tensor:
        raise AssertionError

    with pytest.raises(KeyError, match="Grid"):
        schema_of(takes_a_grid)
