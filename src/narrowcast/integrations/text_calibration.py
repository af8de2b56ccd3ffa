"""Text that goes through a checkpoint's model: `quantize --rounding gptq --data`, and `inspect --budget --data`.

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
from narrowcast.nn.rounding.output_losses import output_sensitivity

LONGEST = 512
"""Tokens of a sample that are used."""
BATCH = 8


def round_on_data(
    source: Path, codec: str, rules: Mapping[str, Any] | None, data: Path, checkpoint: Path | None = None
) -> dict[str, Tensor]:
    """The encoded rows of a model's weights, by their names. `checkpoint` is quantize_'s: a folder to resume from."""
    model, batches = load_with_text(source, data, "--rounding gptq")
    report = quantize_(model, codec, rules=rules, rounding="gptq", data=batches, checkpoint=checkpoint)
    print(report, file=sys.stderr)
    state = model.state_dict()
    return {name: state[name] for name in encodings(model)}


def costs_on_data(source: Path, data: Path) -> dict[str, float]:
    """What a squared error of 1 in each weight costs the model's output on a text, by the weights' names."""
    return output_sensitivity(*load_with_text(source, data, "--data"))


def load_with_text(source: Path, data: Path, option: str) -> tuple[Any, list[dict[str, Tensor]]]:
    """A folder's model, and batches of the samples that stand on the lines of a file."""
    if not source.is_dir() or not (source / "config.json").is_file():
        raise MissingFileError(
            f"SRC={str(source)!r}: {option} runs the model, and needs its folder, with config.json. Name that."
        )
    try:
        lines = data.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"--data {data}: cannot be read as UTF-8 text: {error}. Check the path.") from error
    texts = [line.strip() for line in lines if line.strip()]
    if not texts:
        raise CalibrationError(f"--data {data}: holds no text. Write one sample on each line.")
    config = transformers.AutoConfig.from_pretrained(source)
    kind = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModel)
    model = kind.from_pretrained(source, dtype="auto")
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    options = {"padding": True, "truncation": True, "max_length": LONGEST, "return_tensors": "pt"}
    texts.sort(key=len)  # of like length in a batch, so that little is padding
    return model, [dict(tokenizer(texts[i : i + BATCH], **options)) for i in range(0, len(texts), BATCH)]
