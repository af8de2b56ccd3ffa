"""Headers and JSON from files, checked.

A file may come from anywhere. Everything that its header says is checked here, before a tensor is made from it. What
the package safetensors checks (lengths, offsets that overlap or leave gaps, products of sizes) is not checked again.
Errors name the file, which they get as `where`.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from narrowcast.checkpoint.header import DTYPES, NAMES, SEAL, TEXT, VERSION, Contents, Stored, clip_of, seal
from narrowcast.codecs import Codec, codec
from narrowcast.codecs.payload import Encoding
from narrowcast.codecs.registry import codec_in_file
from narrowcast.errors import CheckpointError, NarrowcastError, NewerVersionError

_FLOATS = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_LIMIT = 1 << 63  # torch counts sizes and elements in int64
DIMENSIONS = 64
"""The most that torch's operators take; also numpy's limit."""
_NESTED = 1_000_000
"""Lists and objects that metadata may hold beside those of the tensors: in memory each takes many times its bytes."""


def parse_header(body: bytes, where: str) -> Contents:
    """The contents of a file, by its header. The package safetensors has accepted the header already."""
    entries = parse_json(body, where)
    metadata = entries.pop("__metadata__", None) or {}
    tensors = _stored(entries, where)
    spans = {name: tuple(entry["data_offsets"]) for name, entry in entries.items()}
    if TEXT not in metadata and SEAL not in metadata:
        return Contents(tensors, spans)
    text, stored_seal = metadata.get(TEXT), metadata.get(SEAL)
    if text is None or stored_seal is None:
        raise CheckpointError(
            f"{where}: the metadata has only one of {TEXT!r} and {SEAL!r}. The file was damaged, or rewritten by a "
            "tool that drops metadata. Copy it again, or write it again with narrowcast.save."
        )
    nested = text.count("[") + text.count("{")
    if nested > _NESTED + 4 * len(tensors):
        raise CheckpointError(
            f"{where}: the metadata holds {nested} lists and objects. The limit, besides those of the tensors, is "
            f"{_NESTED}. Put large values into tensors."
        )
    about = parse_json(text.encode(), where)
    _check_version(about.get("version"), where)
    if stored_seal != seal(tensors, text):
        raise CheckpointError(
            f"{where}: the header does not match its own checksum {short(stored_seal)}, so it was changed after it was "
            "written. Copy the file again from its source."
        )
    return _check_contents(about, tensors, spans, where)


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object in which every name is used once."""
    try:
        return _object(json.loads(text, object_pairs_hook=_unique), "JSON", where)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{where}: not valid JSON: {error}. The file is damaged.") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {short(twice)} is used twice")
    return values


def _object(value: object, what: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {what} is a {type(value).__name__}, not an object. The file is damaged.")
    return value


def _check_version(version: object, where: str) -> None:
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise CheckpointError(f"{where}: version={short(version)} is not a version of the format. The file is damaged.")
    if version > VERSION:
        raise NewerVersionError(
            f"{where}: written in version {version} of the format, and this narrowcast reads versions up to {VERSION}. "
            "Run: pip install --upgrade narrowcast"
        )


def _stored(entries: dict[str, dict[str, Any]], where: str) -> dict[str, Stored]:
    """The dtypes and shapes of the tensors. Many are alike: each pair is checked, and held, once."""
    known: dict[tuple[object, ...], Stored] = {}
    tensors: dict[str, Stored] = {}
    for name, entry in entries.items():
        dtype, shape = entry["dtype"], entry["shape"]
        key = (dtype, *shape)
        if key not in known:
            if dtype not in DTYPES:
                raise CheckpointError(
                    f"{where}: {short(name)} has the dtype {short(dtype)}. There are: {', '.join(DTYPES)}."
                )
            _check_shape(shape, name, where)
            known[key] = Stored(DTYPES[dtype], tuple(shape))
        tensors[name] = known[key]
    return tensors


def _check_shape(shape: object, name: str, where: str) -> None:
    sizes = shape if isinstance(shape, list) else [None]
    if len(sizes) > DIMENSIONS:
        raise CheckpointError(
            f"{where}: {short(name)} has {len(sizes)} dimensions, and a tensor has at most {DIMENSIONS}. The file is "
            "damaged or malicious."
        )
    whole = all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size < _LIMIT for size in sizes)
    # A size of 0 does not excuse the others: torch multiplies them for the strides.
    if not whole or math.prod(size for size in sizes if size) >= _LIMIT:
        raise CheckpointError(
            f"{where}: {short(name)} has the shape {short(shape)}. Sizes are whole numbers whose product is below "
            "2**63. The file is damaged."
        )


def short(value: object) -> str:
    """A value from a file, for an error message: cut to a line or two."""
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."


def _check_contents(
    about: dict[str, Any], tensors: dict[str, Stored], spans: dict[str, tuple[int, int]], where: str
) -> Contents:
    parts = {part: _object(about.get(part), part, where) for part in ("tensors", "checksums", "tied", "user")}
    checksums, tied = parts["checksums"], parts["tied"]
    if checksums.keys() != tensors.keys() or not all(isinstance(value, str) for value in checksums.values()):
        odd = sorted(checksums.keys() ^ tensors.keys())
        odd = odd or [name for name, value in checksums.items() if not isinstance(value, str)]
        raise CheckpointError(
            f"{where}: every tensor needs one checksum; {short(odd[:3])} is missing, is no tensor, or is not text. The "
            "metadata is damaged, or belongs to another file."
        )
    for alias, name in tied.items():
        if alias in tensors or not isinstance(name, str) or name not in tensors:
            raise CheckpointError(
                f"{where}: {short(alias)} is tied to {short(name)}. A tied name stands for a tensor of the file and is "
                "not a tensor itself. The metadata is damaged, or belongs to another file."
            )
    modules = _object(about.get("codecs", {}), "codecs", where)
    encodings = {name: _encoding(entry, name, tensors, modules, where) for name, entry in parts["tensors"].items()}
    layers = _object(about.get("inputs", {}), "inputs", where)
    names = {*tensors, *tied} if layers else set()
    inputs = {layer: _input(entry, layer, names, modules, where) for layer, entry in layers.items()}
    return Contents(tensors, spans, encodings, checksums, tied, parts["user"], inputs)


def _input(entry: object, layer: str, names: set[str], modules: dict[str, Any], where: str) -> tuple[Codec, bool]:
    about = _object(entry, f"the description of the inputs of {short(layer)}", where)
    signed = about.get("signed")
    if clip_of(layer) not in names or not isinstance(signed, bool):
        raise CheckpointError(
            f"{where}: the quantized inputs of {short(layer)} need a signed of true or false, which is "
            f"{short(signed)}, and a tensor {clip_of(layer)!r} in the file. The metadata is damaged, or belongs to "
            "another file."
        )
    return _codec(about.get("codec"), layer, modules, where, of_inputs=True), signed


def _encoding(entry: object, name: str, tensors: dict[str, Stored], modules: dict[str, Any], where: str) -> Encoding:
    about = _object(entry, f"the description of {short(name)}", where)
    dtype = about.get("dtype")
    if not isinstance(dtype, str) or dtype not in _FLOATS:
        raise CheckpointError(
            f"{where}: {short(name)} had the dtype {short(dtype)}. Weights that can be encoded are "
            f"{', '.join(_FLOATS)}."
        )
    _check_shape(about.get("shape"), name, where)
    shape = torch.Size(about["shape"])
    chosen = _codec(about.get("codec"), name, modules, where)
    stored = tensors.get(name)
    if stored is None or not _fits(stored, chosen, shape):
        raise CheckpointError(
            f"{where}: {short(name)} is described as {chosen.spec!r} of shape {short(list(shape))}, but the file holds "
            f"{'nothing of that name' if stored is None else f'{NAMES[stored.dtype]} {list(stored.shape)}'}. "
            "The metadata belongs to another file."
        )
    return Encoding(chosen, shape, _FLOATS[dtype])


def _codec(spec: Any, name: str, modules: dict[str, Any], where: str, of_inputs: bool = False) -> Codec:
    try:
        return codec(spec) if of_inputs else codec_in_file(spec)  # a grid, which has no blocks, or rows of bytes
    except (NarrowcastError, TypeError, ValueError, OverflowError) as error:
        module = modules.get(spec.partition(":")[0]) if isinstance(spec, str) else None
        if isinstance(module, str):
            raise CheckpointError(f"{where}: {short(name)} {_unregistered(spec, module)}") from error
        raise CheckpointError(
            f"{where}: {short(name)} has an invalid codec: {str(error)[:200]} The file comes from a later narrowcast, "
            "or is damaged."
        ) from error


def _unregistered(spec: str, module: str) -> str:
    """Why a codec that is not the library's own cannot be used, and what to do."""
    own = spec.partition(":")[0]
    says = f"is encoded in {short(spec)}, which is not a codec of narrowcast."
    if module == "__main__":
        return (
            f"{says} The script that wrote the file registered it. Do the same here, before loading: "
            f"narrowcast.register_codec({short(own)}, ...) with the same class."
        )
    return f"{says} The module {short(module)} registers it. Import that before loading: import {short(module)[1:-1]}"


def _fits(stored: Stored, chosen: Codec, shape: torch.Size) -> bool:
    lead = len(stored.shape) - 1
    if stored.dtype != torch.uint8 or not 1 <= lead < len(shape) or tuple(shape[:lead]) != stored.shape[:lead]:
        return False
    return stored.shape[-1] == chosen.row_bytes(math.prod(shape[lead:]))
