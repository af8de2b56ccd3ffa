"""Every public name of narrowcast. `import narrowcast` is free; this is loaded with the first of them that is used."""

from narrowcast import codecs, errors, integrations, nn, optim
from narrowcast.checkpoint.models import load, save
from narrowcast.codecs import Codec, codec, list_codecs, register_codec, which_kernel
from narrowcast.codecs.payload import Payload, decode, encode
from narrowcast.distributed import GradientCompression, compress_gradients, gradient_hook
from narrowcast.nn import Report, calibrate_, convert_, dequantize_, parameter_groups, prepare_qat_, quantize_

__all__ = [
    "Codec",
    "GradientCompression",
    "Payload",
    "Report",
    "calibrate_",
    "codec",
    "codecs",
    "compress_gradients",
    "convert_",
    "decode",
    "dequantize_",
    "encode",
    "errors",
    "gradient_hook",
    "integrations",
    "list_codecs",
    "load",
    "nn",
    "optim",
    "parameter_groups",
    "prepare_qat_",
    "quantize_",
    "register_codec",
    "save",
    "which_kernel",
]
