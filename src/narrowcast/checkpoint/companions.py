"""The files beside the weights: configuration, tokenizer, templates, licences.

Small text files are copied as they are, those of sub-folders too. `config.json` gets the entry `quantization_config`,
which lists the codec of each weight, so that transformers reads the folder. Other weights (pickles, GGUF, ONNX) are not
copied: they hold the original model. The modules of a sentence-transformers model are an exception: its `modules.json`
names their folders, and they are copied with all that they hold.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from narrowcast.checkpoint.files import Staging
from narrowcast.checkpoint.parse import parse_json
from narrowcast.errors import CheckpointError

CONFIG = "config.json"
_COPIED = {".json", ".txt", ".model", ".jinja", ".md", ".py", ".tiktoken", ".yaml", ".yml", ".toml", ".vocab", ".bpe"}
_NAMES = {"LICENSE", "LICENCE", "NOTICE", "USE_POLICY", "README"}


def companions(source: Path, target: Path | None = None) -> tuple[list[str], list[str]]:
    """The files of a folder that are copied, and those that are not, or their folders: as paths inside the folder.

    `target` is where they go. A sub-folder that holds it is left out.
    """
    taken: list[str] = []
    left: list[str] = []
    modules = _module_folders(source)
    for path in sorted(source.iterdir()) if source.is_dir() else ():
        if path.name.startswith(".") or (target and target.resolve().is_relative_to(path.resolve())):
            continue
        if path.is_dir():
            inside = [file for file in sorted(path.rglob("[!.]*")) if file.is_file()]
            chosen = inside if path.name in modules else [file for file in inside if _goes(file)]
            taken += [file.relative_to(source).as_posix() for file in chosen]
            left += [file.relative_to(source).as_posix() for file in inside if file not in chosen] if chosen else []
            left += [] if chosen else [path.name]
        elif not path.name.endswith((".safetensors", ".safetensors.index.json")):
            (taken if _goes(path) else left).append(path.name)
    return taken, left


def _goes(path: Path) -> bool:
    known = path.suffix.lower() in _COPIED or path.name in _NAMES
    # The index of shards is useless without them.
    return path.is_file() and known and not path.name.endswith((".bin.index.json", ".safetensors.index.json"))


def _module_folders(source: Path) -> set[str]:
    """The sub-folders that the modules of a sentence-transformers model live in."""
    try:
        modules = json.loads((source / "modules.json").read_bytes())
        return {str(module["path"]).partition("/")[0] for module in modules if module["path"]}
    except (OSError, ValueError, TypeError, KeyError):
        return set()


def config_of(source: Path) -> dict[str, Any] | None:
    """The model's configuration, or None. The configuration of a quantized model is refused."""
    path = source / CONFIG
    if not path.is_file():
        return None
    config = parse_json(path.read_bytes(), str(path))
    if "quantization_config" in config:
        raise CheckpointError(
            f'{path}: has a "quantization_config", so the weights are quantized already. Start from the original model.'
        )
    return config


def declared_weights(source: Path) -> dict[str, str]:
    """The codecs of modules and tensors in the `config.json` that `save_pretrained` writes for a quantized model."""
    path = source / CONFIG
    quantization = parse_json(path.read_bytes(), str(path)).get("quantization_config") if path.is_file() else None
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "narrowcast":
        return {}
    weights = quantization.get("weights")
    if not isinstance(weights, dict) or not all(isinstance(spec, str) for spec in weights.values()):
        raise CheckpointError(f'{path}: "weights" of "quantization_config" must map names to codecs.')
    return weights


def copy_companions(source: Path, target: Path, names: list[str], quantization: dict[str, Any]) -> None:
    """Copy the named files; `config.json` gets the entry `quantization_config`."""
    config = config_of(source) if names else None
    with Staging(target) as staging:
        for name in names:
            with staging.file(name) as file:
                if name == CONFIG and config is not None:
                    file.write(json.dumps({**config, "quantization_config": quantization}, indent=2).encode() + b"\n")
                else:
                    with open(source / name, "rb") as original:
                        shutil.copyfileobj(original, file)
        staging.publish()
