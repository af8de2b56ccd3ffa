"""Products with encoded weights as MatMulNBits, an operator of onnxruntime (domain com.microsoft).

It takes the codes of each row in blocks [rows, blocks, bytes of a block], low bits first, as unsigned integers; a scale
for each block; and zero points, or the middle of the range where there are none. Blocks are powers of two from 16 to
256; a short last block is filled up.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from torch.nn import functional as F

from narrowcast.integrations.onnx_weights import WIDTHS, Array, fields, initializer
from narrowcast.kernels.layout import Element, layout
from narrowcast.nn.modules.base import Held

DOMAIN = "com.microsoft"
BLOCKS = (16, 32, 64, 128, 256)
GEMM = {"transA": 0, "transB": 1, "alpha": 1.0, "beta": 1.0}
"""Of a Gemm that is x W^T + b. Where an attribute is missing it is as here, but for transB."""


def replace(model: ir.Model, name: str, rows: Tensor, held: Held) -> bool:
    """Make every product with the weight `name` a MatMulNBits; False where it has other uses, or does not fit."""
    graph = model.graph
    weight = graph.initializers[name]
    format = held.codec.format
    if len(held.shape) != 2 or held.transposed or weight.dtype != ir.DataType.FLOAT:
        return False
    if format.element not in (Element.INT, Element.AFFINE) or format.bits not in WIDTHS:
        return False
    if layout(format, held.shape[1]).block_size not in BLOCKS:
        return False
    products = [_product(node) for node in weight.consumers()]
    if not products or not all(products):
        return False
    packed = _packed(graph, name, rows, held)
    attributes = {
        "K": held.shape[1],
        "N": held.shape[0],
        "bits": format.bits,
        "block_size": layout(format, held.shape[1]).block_size,
    }
    for product in products:
        assert product is not None
        last, x, bias = product
        node = ir.node("MatMulNBits", [x, *packed], attributes=attributes, domain=DOMAIN)
        nodes = [node]
        if bias is not None:
            nodes.append(ir.node("Add", [node.outputs[0], bias]))
        output = nodes[-1].outputs[0]
        output.shape, output.type = last.outputs[0].shape, last.outputs[0].type
        graph.insert_before(last, nodes)
        ir.convenience.replace_all_uses_with(last.outputs[0], output, replace_graph_outputs=True)
        output.name, last.outputs[0].name = last.outputs[0].name, None
        graph.remove(last, safe=True)
    for node in list(weight.consumers()):
        graph.remove(node, safe=True)
    del graph.initializers[name]
    model.opset_imports[DOMAIN] = 1
    return True


def _product(node: ir.Node) -> tuple[ir.Node, ir.Value, ir.Value | None] | None:
    """The node whose result is x W^T + b, x and b, where W's consumer is `node`; None where it is none."""
    if node.op_type == "Gemm":
        given = {key: attribute.value for key, attribute in node.attributes.items()}
        same = {**GEMM, "transB": 0, **given} == GEMM
        x = node.inputs[0]
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        return (node, x, bias) if same and x is not None else None
    if node.op_type != "Transpose" or len(list(node.outputs[0].consumers())) != 1:
        return None
    (product,) = node.outputs[0].consumers()
    x = product.inputs[0]
    if product.op_type != "MatMul" or x is None or product.inputs[1] is not node.outputs[0]:
        return None
    return product, x, None


def _packed(graph: ir.Graph, name: str, rows: Tensor, held: Held) -> list[ir.Value]:
    """The codes, scales and, if any, zero points, as MatMulNBits takes them."""
    codes, scales, zero_points = fields(rows, held)
    bits, block = held.codec.bits, layout(held.codec.format, codes.shape[1]).block_size
    unsigned = codes.to(torch.int16) + (0 if zero_points is not None else 1 << (bits - 1))
    blocks = scales.shape[1]
    padded = F.pad(unsigned, (0, blocks * block - codes.shape[1])).view(len(codes), blocks, block).numpy()
    values = [
        initializer(graph, f"{name}_codes", _bytes(padded, bits), ir.DataType.UINT8),
        initializer(graph, f"{name}_scales", scales.float().numpy().reshape(-1), ir.DataType.FLOAT),
    ]
    if zero_points is not None:
        filled = F.pad(zero_points.to(torch.int16), (0, blocks % 2 if bits == 4 else 0)).numpy()
        values.append(initializer(graph, f"{name}_zero_points", _bytes(filled, bits).reshape(-1), ir.DataType.UINT8))
    return values


def _bytes(codes: Array, bits: int) -> Array:
    """Codes [..., count] as bytes: two of 4 bits in each, the first in the low ones."""
    small = codes.astype(np.uint8)
    return small if bits == 8 else small[..., ::2] | (small[..., 1::2] << 4)
