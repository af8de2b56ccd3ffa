"""The operator behind moments in rows: what it refuses, and that torch sees what it changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import narrowcast as nc
from moment_cases import STEP, operands
from narrowcast.errors import DtypeError, ShapeError
from narrowcast.kernels.operators.adamw import SCHEMA, adamw_

RECIPE = nc.codec("int8").recipe(torch.device("cpu"))


def given(**changed: Any) -> list[Any]:
    names = ("parameter", "first", "second", "grad")
    tensors = dict(zip(names, operands("int8", (3, 200), torch.float32), strict=True))
    tensors |= {name: change(tensors[name]) for name, change in changed.items() if name != "recipe"}
    return [*tensors.values(), changed.get("recipe", RECIPE), 7, False, STEP]


@pytest.mark.parametrize(
    ("name", "change", "error", "words"),
    [
        ("parameter", lambda t: t.double(), DtypeError, "parameter: expected"),
        ("parameter", lambda t: t.view(-1), ShapeError, "expected a matrix"),
        ("parameter", lambda t: t.t().contiguous().t(), ShapeError, "parameter: must be contiguous"),
        ("grad", lambda t: t.half(), DtypeError, "grad: expected float32"),
        ("grad", lambda t: t[:2], ShapeError, "grad: expected shape"),
        ("grad", lambda t: t.to("meta"), ShapeError, "grad: is on meta"),
        ("first", lambda t: t[:, :-16], ShapeError, "first: expected shape"),
        ("first", lambda t: t.float(), DtypeError, "first: expected uint8"),
        ("second", lambda t: t[:1], ShapeError, "second: expected shape"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(name: str, change: Any, error: Any, words: str) -> None:
    arguments = given(**{name: change})
    before = [each.clone() for each in arguments[:4]]
    with pytest.raises(error, match=words):
        adamw_(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(before, arguments[:4], strict=True) if not a.is_meta)


@pytest.mark.parametrize("spec", ["int8:block=row", "int8:block=8192"])
def test_blocks_that_are_too_large_are_refused(spec: str) -> None:
    with pytest.raises(ShapeError, match="blocks of up to 4096"):
        adamw_(*given(recipe=nc.codec(spec).recipe(torch.device("cpu"))))


def test_the_operator_says_what_it_changes() -> None:
    torch.library.opcheck(
        torch.ops.narrowcast.adamw_.default,
        SCHEMA.spread(tuple(given())),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_a_parameter_without_rows_or_columns_is_taken() -> None:
    for shape in ((0, 200), (3, 0)):
        parameter = torch.zeros(shape, dtype=torch.float32)

        def rows(format_bytes: int, count: int = shape[0]) -> Tensor:
            return torch.zeros(count, format_bytes, dtype=torch.uint8)

        numel = shape[1]
        first = rows(nc.codec("int8").row_bytes(numel))
        second = rows(208 if numel else 0)
        adamw_(parameter, first, second, parameter.clone(), RECIPE, 1, False, STEP)
