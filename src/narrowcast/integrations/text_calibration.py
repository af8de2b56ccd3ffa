"""Rows of a checkpoint's weights, rounded on text that goes through its model: `narrowcast quantize --rounding gptq`.

The model is loaded with transformers, as its config.json names it, and its text with the tokenizer beside it. Rows come
under the names that the model gives its weights; those of the checkpoint that have others are searched instead.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor

from narrowcast.errors import CalibrationError, MissingFileError
from narrowcast.nn import encodings, quantize_

LONGEST = 512
"""Tokens of a sample that are used."""
BATCH = 8


def round_on_data(source: Path, codec: str, rules: Mapping[str, Any] | None, data: Path) -> dict[str, Tensor]:
    """The encoded rows of a model's weights, by their names."""
    if not source.is_dir() or not (source / "config.json").is_file():
        raise MissingFileError(
            f"SRC={str(source)!r}: --rounding gptq runs the model, and needs its folder, with config.json. Name that."
        )
    texts = [line.strip() for line in data.read_text("utf-8").splitlines() if line.strip()]
    if not texts:
        raise CalibrationError(f"--data {data}: holds no text. Write one sample on each line.")
    config = transformers.AutoConfig.from_pretrained(source)
    kind = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModel)
    model = kind.from_pretrained(source, dtype="auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    options = {"padding": True, "truncation": True, "max_length": LONGEST, "return_tensors": "pt"}
    texts.sort(key=len)  # of like length in a batch, so that little is padding
    batches = [dict(tokenizer(texts[i : i + BATCH], **options)) for i in range(0, len(texts), BATCH)]
    report = quantize_(model, codec, rules=rules, rounding="gptq", data=batches)
    print(report, file=sys.stderr)
    state = model.state_dict()
    return {name: state[name] for name in encodings(model)}
