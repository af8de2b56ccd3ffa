"""narrowcast inside other libraries. A module, and the library that it needs, is imported when it is first used.

    narrowcast.integrations.transformers         NarrowcastConfig: quantize in `from_pretrained`, save, load again
    narrowcast.integrations.compressed_tensors   export: a folder in the format that vLLM and others read
    narrowcast.integrations.text_calibration     rows rounded on text, for `narrowcast quantize --rounding gptq`
    narrowcast.integrations.text                 a folder's tokenizer, for `narrowcast generate`
    narrowcast.integrations.accelerate           compress_gradients, with Accelerate's checkpoints
    narrowcast.integrations.hf_trainer           CompressGradients: a callback for the Trainer of transformers
    narrowcast.integrations.lightning            CompressGradients: a callback for Lightning's Trainer
    narrowcast.integrations.onnx                 export: a model as an ONNX file, its weights still encoded

They need `pip install 'narrowcast[hf]'`; Lightning's needs `pip install 'narrowcast[lightning]'`, ONNX's
`pip install 'narrowcast[onnx]'`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["accelerate", "compressed_tensors", "hf_trainer", "lightning", "onnx", "transformers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. There are: {', '.join(__all__)}.")
    return import_module(f"{__name__}.{name}")
