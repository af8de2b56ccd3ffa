"""A weight in an ONNX graph as codes and scales, and the operators that decode it.

`replace` takes the float initializer of a weight out of a graph, and puts codes, scales and DequantizeLinear in its
place. Where all that is done with a 2-D weight is to transpose it, as for a Linear layer with an input of three
dimensions, it is stored transposed, so that nothing is transposed at run time.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from torch import Tensor

from narrowcast.codecs import Codec
from narrowcast.kernels.layout import Element, layout
from narrowcast.nn.modules.base import Held, as_bytes

WIDTHS = (4, 8)
CASTS = {Element.FP16: ir.DataType.FLOAT16, Element.BF16: ir.DataType.BFLOAT16}
INTEGERS = {
    (4, False): (ml_dtypes.int4, ir.DataType.INT4),
    (4, True): (ml_dtypes.uint4, ir.DataType.UINT4),
    (8, False): (np.int8, ir.DataType.INT8),
    (8, True): (np.uint8, ir.DataType.UINT8),
}
"""By bits and whether there are zero points: codes count from 0 then."""

ENCODED = "narrowcast.encoded"
"""A mark on the tensors of encoded weights."""

Array = npt.NDArray[Any]


def refusal(codec: Codec) -> str | None:
    """Why a codec has no place in ONNX; None for one that has."""
    format = codec.format
    if format.element in (Element.FP32, *CASTS):
        return None
    if format.element in (Element.INT, Element.AFFINE) and format.bits in WIDTHS:
        return None
    if format.element in (Element.INT, Element.AFFINE):
        return f"codec {codec.spec!r} has {format.bits}-bit integers, and DequantizeLinear of ONNX takes 4 or 8 bits."
    return f"codec {codec.spec!r} is no grid of integers, and ONNX has no operator that decodes it."


def fields(rows: Tensor, held: Held) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes [rows, numel], scales [rows, blocks] and zero points of a weight in int4 or int8."""
    numel = math.prod(held.shape[rows.dim() - 1 :])
    flat = as_bytes(rows).detach().cpu().reshape(-1, rows.shape[-1])
    codes, scales, zero_points = held.codec.split(flat, numel)
    assert scales is not None
    return codes, scales, zero_points


def replace(graph: ir.Graph, name: str, rows: Tensor, held: Held) -> None:
    """Put the encoded form of the weight `name` in place of its floats."""
    element = held.codec.format.element
    if element == Element.FP32:
        return
    weight = graph.initializers[name]
    if element in CASTS:
        _replace_cast(graph, weight, CASTS[Element(element)])
        return
    matrix = len(held.shape) == 2
    turned = matrix and held.transposed
    nodes = list(weight.consumers())
    absorbed = [node for node in nodes if _is_transpose(node)]
    if matrix and not held.transposed and nodes and len(absorbed) == len(nodes):
        decoded = _decode(graph, name, rows, held, weight, turned=True)
        for node in absorbed:
            ir.convenience.replace_all_uses_with(node.outputs[0], decoded, replace_graph_outputs=True)
            graph.remove(node, safe=True)
    else:
        decoded = _decode(graph, name, rows, held, weight, turned=turned)
        ir.convenience.replace_all_uses_with(weight, decoded, replace_graph_outputs=True)
    del graph.initializers[name]


def initializer(graph: ir.Graph, name: str, array: Array, dtype: ir.DataType) -> ir.Value:
    """A tensor of the file."""
    tensor = ir.Tensor(np.ascontiguousarray(array), dtype=dtype, name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(dtype), const_value=tensor)
    value.metadata_props[ENCODED] = "1"
    graph.register_initializer(value)
    return value


def may_fold(node: ir.Node) -> bool | None:
    """Whether an optimizer may compute a node ahead: None leaves it to the optimizer. What decodes a weight stays."""
    return False if any(value is not None and ENCODED in value.metadata_props for value in node.inputs) else None


def insert(graph: ir.Graph, node: ir.Node) -> None:
    """Put a node that reads initializers alone before all others."""
    graph.insert_before(graph[0], node)


def _is_transpose(node: ir.Node) -> bool:
    perm = node.attributes.get("perm")
    return node.op_type == "Transpose" and not node.domain and perm is not None and list(perm.as_ints()) == [1, 0]


def _replace_cast(graph: ir.Graph, weight: ir.Value, stored: ir.DataType) -> None:
    """The floats in fewer bits, which hold them exactly, and a Cast; nothing, where the model has these already."""
    assert weight.const_value is not None
    assert weight.name is not None
    if weight.dtype == stored:
        return
    name, dtype = weight.name, weight.dtype
    array = weight.const_value.numpy().astype(np.float32).astype(stored.numpy())
    small = initializer(graph, f"{name}_{stored.name.lower()}", array, stored)
    cast = ir.node("Cast", [small], attributes={"to": int(dtype or ir.DataType.FLOAT)})
    cast.outputs[0].name = f"{name}_decoded"
    ir.convenience.replace_all_uses_with(weight, cast.outputs[0], replace_graph_outputs=True)
    insert(graph, cast)
    del graph.initializers[name]


def _decode(graph: ir.Graph, name: str, rows: Tensor, held: Held, weight: ir.Value, *, turned: bool) -> ir.Value:
    """The value that a weight decodes to: DequantizeLinear, then what shape and dtype ask for."""
    codes, scales, zero_points = fields(rows, held)
    where = layout(held.codec.format, codes.shape[1])
    by_rows = where.blocks == 1
    axis = 0 if by_rows else 1
    if turned:
        codes, axis = codes.t(), 1 - axis
        scales, zero_points = scales.t(), None if zero_points is None else zero_points.t()
    kind, dtype = INTEGERS[held.codec.bits, zero_points is not None]
    shape = [scales.numel()] if by_rows else list(scales.shape)
    inputs = [
        initializer(graph, f"{name}_codes", codes.numpy().astype(kind), dtype),
        initializer(graph, f"{name}_scales", scales.float().numpy().reshape(shape), ir.DataType.FLOAT),
    ]
    if zero_points is not None:
        inputs.append(initializer(graph, f"{name}_zero_points", zero_points.numpy().reshape(shape).astype(kind), dtype))
    attributes = {"axis": axis} if by_rows else {"axis": axis, "block_size": where.block_size}
    nodes = [ir.node("DequantizeLinear", inputs, attributes=attributes)]
    if list(codes.shape) != list(held.shape) and not turned:
        target = np.array(held.shape, dtype=np.int64)
        size = initializer(graph, f"{name}_shape", target, ir.DataType.INT64)
        nodes.append(ir.node("Reshape", [nodes[-1].outputs[0], size]))
    if weight.dtype not in (None, ir.DataType.FLOAT):
        nodes.append(ir.node("Cast", [nodes[-1].outputs[0]], attributes={"to": int(weight.dtype)}))
    nodes[-1].outputs[0].name = f"{name}_decoded"
    for node in reversed(nodes):
        insert(graph, node)
    return nodes[-1].outputs[0]
