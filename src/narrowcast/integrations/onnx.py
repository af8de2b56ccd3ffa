"""Export to ONNX with encoded weights: decoding is done by operators of ONNX, and no runtime needs narrowcast.

The model is exported by torch with decoded weights. Then each weight that was encoded is put back as codes and scales,
with the operators that decode it:

- `int4` and `int8`, with or without `zero_point=true`: DequantizeLinear, of opset 21 on, by blocks or by rows. Codes
  take 4 or 8 bits in the file, scales are fp32. The weight that it decodes to is the codec's, bit for bit.
- `fp16` and `bf16`: a tensor of that type, and Cast.
- `raw`: the floats that it holds.

With `operators="microsoft"`, products of 2-D weights in `int4` and `int8` are MatMulNBits of onnxruntime, which never
rebuilds the weight; other weights decode as above.

ONNX has no operator for other codecs. They are refused with an `ExportError` before anything is written; with
`others="decode"` they are written as floats, and `export` returns their names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import ExportError
from narrowcast.nn.modules.base import Encoded, Held, copy_modules, encoded_parameters
from narrowcast.nn.quantize import dequantize_

try:
    from onnxscript import optimizer

    from narrowcast.integrations import onnx_products, onnx_weights
except ImportError as error:
    raise ImportError(
        "narrowcast.integrations.onnx needs the packages onnx and onnxscript. Run: pip install 'narrowcast[onnx]'"
    ) from error

OPSET = 21
"""The first with 4-bit integers, and with blocks in DequantizeLinear."""

OPERATORS = ("standard", "microsoft")
OTHERS = ("refuse", "decode")


def export(
    model: nn.Module,
    args: Sequence[Any],
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    operators: str = "standard",
    others: str = "refuse",
    opset_version: int = OPSET,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_shapes: Any = None,
) -> dict[str, str]:
    """Write a model that `quantize_` converted as an ONNX file, in evaluation mode; the model is left as it is.

    `args`, `kwargs` and the last three arguments are those of torch.onnx.export, with `dynamo=True`. Weights beyond
    2 GB go into a second file beside it, as ONNX wants it.

    Returns the encoded weights that were written as floats, and why: none, unless `others="decode"`.
    """
    _check_arguments(model, args, path, operators, others, opset_version)
    weights = _encoded(model)
    decoded = _without_operator(weights, others)
    program = torch.onnx.export(
        dequantize_(copy_modules(model)).eval(),
        tuple(args),
        kwargs=dict(kwargs or {}),
        dynamo=True,
        optimize=False,  # below: it would fold the weights into something else
        verbose=False,
        opset_version=opset_version,
        input_names=input_names,
        output_names=output_names,
        dynamic_shapes=dynamic_shapes,
    )
    assert program is not None
    graph = program.model.graph
    for names, rows, held in weights:
        used = [name for name in names if name in graph.initializers]
        if not used or names[0] in decoded:  # the graph does not read it; or it stays decoded
            continue
        if operators == "standard" or not onnx_products.replace(program.model, used[0], rows, held):
            onnx_weights.replace(graph, used[0], rows, held)
    optimizer.optimize_ir(program.model, should_fold=onnx_weights.may_fold)
    program.save(str(path))
    return decoded


def _encoded(model: nn.Module) -> list[tuple[list[str], Tensor, Held]]:
    """Encoded weights with all of their names: tied ones have several."""
    by_id: dict[int, tuple[list[str], Tensor, Held]] = {}
    for name, rows, held in _every(model):
        by_id.setdefault(id(rows), ([], rows, held))[0].append(name)
    if not by_id:
        raise ExportError(
            "model: no weight in it is quantized by narrowcast. Call narrowcast.quantize_(model) first, or export it "
            "with torch.onnx.export."
        )
    return list(by_id.values())


def _without_operator(weights: list[tuple[list[str], Tensor, Held]], others: str) -> dict[str, str]:
    """The weights whose codec no operator of ONNX decodes, and why; refused, unless they may be written as floats."""
    reasons = {names[0]: why for names, _, held in weights if (why := onnx_weights.refusal(held.codec))}
    if reasons and others == "refuse":
        name, why = next(iter(reasons.items()))
        raise ExportError(
            f'{name}: {why} Quantize it with "int4" or "int8", leave it out with quantize_(..., '
            f'rules={{"{name}": None}}), or write it as floats with others="decode". One of {len(reasons)} such.'
        )
    return reasons


def _every(model: nn.Module) -> Iterator[tuple[str, Tensor, Held]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Encoded):
            for name, held in encoded_parameters(module).items():
                yield f"{prefix}.{name}" if prefix else name, getattr(module, name), held


def _check_arguments(
    model: nn.Module, args: Sequence[Any], path: str | os.PathLike[str], operators: str, others: str, opset: int
) -> None:
    if not isinstance(model, nn.Module):
        raise ExportError(f"model: expected a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(args, Tensor) or not isinstance(args, Sequence):
        raise ExportError(
            f"args: expected a tuple of the model's inputs, got {type(args).__name__}. For one input write args=(x,)."
        )
    if operators not in OPERATORS:
        raise ExportError(
            f'operators={operators!r}: is none of {", ".join(OPERATORS)}. "standard" runs everywhere, "microsoft" in '
            "onnxruntime."
        )
    if others not in OTHERS:
        raise ExportError(f'others={others!r}: is none of {", ".join(OTHERS)}. "decode" writes such weights as floats.')
    if opset < OPSET:
        raise ExportError(
            f"opset_version={opset}: 4-bit integers and blocks of scales came with opset {OPSET}. Leave it out."
        )
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ExportError(f"path={str(path)!r}: there is no folder {str(folder)!r}. Make it first.")
