"""Additive powers of two as `torch.ao.quantization.experimental` has them: the same names, codes and level order.

The files below have the names of PyTorch's, so that a program changes only the front of its imports, from
`torch.ao.quantization.experimental` to `narrowcast.compat.apot`; every name is here, too.

- A grid of b bits and k bits a term has n = b / k terms; term i takes 0 or 2**-(i + j n) for j = 0 .. 2**k - 2, and in
  a signed grid the negatives, too. `quantization_levels` are all sums times gamma, ascending; a level's code is its
  place in the product of the terms: unsigned, the bit fields [p0|p1|...]. Signed grids repeat levels (49 entries for
  b=4, k=2); of equals the first code is given. The paper's signed grids are others: `narrowcast.codecs.apot_levels`.
- A number goes to the nearest level, ties to the lower one; beyond alpha it is clipped. A NaN has no code: it is
  refused where codes are asked for, and stays a NaN where floats are.
- Inputs are never changed, results have the input's dtype and device, and nothing loops over elements in Python.
- Fake quantization has PyTorch's gradient: it passes where |x| <= alpha. Grids are signed where the data is.
- `LinearAPoT` multiplies by levels. PyTorch's test_linear.py wants products with the codes: those of its own file,
  `narrowcast.compat.apot.linear.LinearAPoT`.
- The files adaround_* round weights up or down by what a layer's output loses: see adaround_optimization.py.
- paper.py imports checkpoints of the paper's authors.
"""

from narrowcast.compat.apot.adaround_fake_quantize import AdaroundFakeQuantizer
from narrowcast.compat.apot.adaround_loss import AdaptiveRoundingLoss
from narrowcast.compat.apot.adaround_optimization import AdaptiveRoundingOptimizer
from narrowcast.compat.apot.APoT_tensor import TensorAPoT
from narrowcast.compat.apot.apot_utils import apot_to_float, float_to_apot, quant_dequant_util
from narrowcast.compat.apot.fake_quantize import APoTFakeQuantize
from narrowcast.compat.apot.fake_quantize_function import fake_quantize_function
from narrowcast.compat.apot.layer import LinearAPoT
from narrowcast.compat.apot.observer import APoTObserver
from narrowcast.compat.apot.qconfig import (
    apot_qconfig_4bit,
    apot_qconfig_8bit,
    apot_weight_qconfig_4bit,
    apot_weight_qconfig_8bit,
    default_symmetric_fake_quant,
    default_weight_symmetric_fake_quant,
    uniform_qconfig_4bit,
    uniform_qconfig_8bit,
)
from narrowcast.compat.apot.quantizer import APoTQuantizer, dequantize_APoT, quant_dequant_APoT, quantize_APoT

__all__ = [
    "APoTFakeQuantize",
    "APoTObserver",
    "APoTQuantizer",
    "AdaptiveRoundingLoss",
    "AdaptiveRoundingOptimizer",
    "AdaroundFakeQuantizer",
    "LinearAPoT",
    "TensorAPoT",
    "apot_qconfig_4bit",
    "apot_qconfig_8bit",
    "apot_to_float",
    "apot_weight_qconfig_4bit",
    "apot_weight_qconfig_8bit",
    "default_symmetric_fake_quant",
    "default_weight_symmetric_fake_quant",
    "dequantize_APoT",
    "fake_quantize_function",
    "float_to_apot",
    "quant_dequant_APoT",
    "quant_dequant_util",
    "quantize_APoT",
    "uniform_qconfig_4bit",
    "uniform_qconfig_8bit",
]
