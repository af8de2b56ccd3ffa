"""Encoded rows inside modules, under the names of torch.nn.

`quantize_` turns the weights of a model into encoded rows, in place, and `dequantize_` turns them back. A quantized
model consists of the modules below; `encodings` and `adopt` carry it through files.
"""

from narrowcast.nn.encodings import adopt, encodings
from narrowcast.nn.modules.attention import MultiheadAttention
from narrowcast.nn.modules.base import Encoded
from narrowcast.nn.modules.conv import Conv1d, Conv2d, Conv3d
from narrowcast.nn.modules.embedding import Embedding
from narrowcast.nn.modules.experts import ExpertRows
from narrowcast.nn.modules.linear import Linear
from narrowcast.nn.qat.calibrate import Calibration, calibrate_
from narrowcast.nn.qat.convert import convert_
from narrowcast.nn.qat.fake_quantize import FakeQuantize
from narrowcast.nn.qat.integer import IntegerConv1d, IntegerConv2d, IntegerLinear
from narrowcast.nn.qat.layers import QatConv1d, QatConv2d, QatConv3d, QatEmbedding, QatLinear
from narrowcast.nn.qat.observers import LeastSquares, MinMax, MovingAverage, Observer, Percentile
from narrowcast.nn.qat.prepare import parameter_groups, prepare_qat_
from narrowcast.nn.quantize import dequantize_, quantize_
from narrowcast.nn.report import Entry, Report
from narrowcast.nn.rounding.gptq import GPTQ
from narrowcast.nn.survey import Skip

__all__ = [
    "GPTQ",
    "Calibration",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "Embedding",
    "Encoded",
    "Entry",
    "ExpertRows",
    "FakeQuantize",
    "IntegerConv1d",
    "IntegerConv2d",
    "IntegerLinear",
    "LeastSquares",
    "Linear",
    "MinMax",
    "MovingAverage",
    "MultiheadAttention",
    "Observer",
    "Percentile",
    "QatConv1d",
    "QatConv2d",
    "QatConv3d",
    "QatEmbedding",
    "QatLinear",
    "Report",
    "Skip",
    "adopt",
    "calibrate_",
    "convert_",
    "dequantize_",
    "encodings",
    "parameter_groups",
    "prepare_qat_",
    "quantize_",
]
