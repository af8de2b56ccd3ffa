"""State dicts to files: what is stored once, and which tensor goes into which file.

A state dict maps names to tensors and `EncodedRows`. Names of the very same tensor are stored once and listed as tied.
Tensors that share part of their memory are refused: once loaded they would share nothing.

A path that ends in ".safetensors" is a file. Any other is a folder, which gets `model.safetensors`, or, above
`max_shard_size`, files of up to that size and an index as Hugging Face writes them. All files are complete before the
first appears under its name, and take effect together, by one rename. folders.py describes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowcast.checkpoint.files import Entry, Staging, as_path, new_file, write_tensors
from narrowcast.checkpoint.folders import header_digest, publish_shards, publish_single, shard_names
from narrowcast.checkpoint.header import NAMES, Stored, clip_of
from narrowcast.checkpoint.mapping import PICKLES
from narrowcast.codecs import Codec
from narrowcast.codecs.payload import EncodedRows, Encoding, Payload
from narrowcast.codecs.registry import check_storable
from narrowcast.errors import CheckpointError

_UNITS = {"": 1, "B": 1, **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)}}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)}


def save_state(
    state: Mapping[str, Tensor | EncodedRows],
    path: str | Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    max_shard_size: int | str = "5GB",
    inputs: Mapping[str, tuple[Codec, bool]] | None = None,
) -> None:
    """Write a state dict to a file or a folder. `metadata`: any values that JSON has.

    `inputs`: the layers that quantize their inputs, by name: the codec, and whether its grid is signed.
    """
    path, user, limit = as_path(path), _as_json(metadata), size_in_bytes(max_shard_size)
    check_ending(f"path={str(path)!r}", path)
    entries, tied = _list_entries(state)
    used = [entry.encoding.codec for entry in entries if entry.encoding] + [own for own, _ in (inputs or {}).values()]
    for own in {id(codec): codec for codec in used}.values():
        check_storable(own)
    if path.suffix == ".safetensors" and not path.is_dir():
        with new_file(path) as file:
            write_tensors(file, entries, tied, user, inputs=inputs)
        return
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"path={str(path)!r}: is a file. Name a folder, or a file that ends in .safetensors.")
    path.mkdir(parents=True, exist_ok=True)
    _save_folder(path, split_into_shards(entries, limit), tied, user, inputs or {})


def check_ending(what: str, path: Path) -> None:
    """Refuse a new folder whose name ends like a pickle's: a file was meant. Errors call the folder `what`."""
    if path.suffix.lower() in PICKLES and not path.is_dir():
        raise CheckpointError(
            f"{what}: narrowcast writes safetensors files, not pickles. Write "
            f"{str(path.with_suffix('.safetensors'))!r} for a file, or {str(path.with_suffix(''))!r} for a folder."
        )


def _save_folder(
    folder: Path,
    groups: Sequence[Sequence[Entry]],
    tied: dict[str, str],
    user: dict[str, Any],
    inputs: Mapping[str, tuple[Codec, bool]],
) -> None:
    headers = []
    with Staging(folder) as staging:
        for name, group, own in zip(shard_names(len(groups)), groups, split_tied(groups, tied), strict=True):
            with staging.file(name) as file:
                names = {entry.name for entry in group} | own.keys()
                described = {layer: grid for layer, grid in inputs.items() if clip_of(layer) in names}
                headers.append(header_digest(write_tensors(file, group, own, user, inputs=described)))
        if len(groups) == 1:
            publish_single(folder, staging)
        else:
            publish_shards(folder, staging, groups, headers)


def split_tied(groups: Sequence[Sequence[Entry]], tied: Mapping[str, str]) -> list[dict[str, str]]:
    """The tied names of each group: those that stand for one of its tensors."""
    group_of = {entry.name: place for place, group in enumerate(groups) for entry in group}
    aliases: list[dict[str, str]] = [{} for _ in groups]
    for alias, name in tied.items():
        aliases[group_of[name]][alias] = name
    return aliases


def _list_entries(state: Mapping[str, Tensor | EncodedRows]) -> tuple[list[Entry], dict[str, str]]:
    """The tensors to store, in order, and the names that are tied: {alias: name}."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"expected a model or a mapping of names to tensors, got {type(state).__name__}.")
    entries: list[Entry] = []
    tied: dict[str, str] = {}
    seen: dict[object, str] = {}
    tensors: list[tuple[str, Tensor]] = []
    for name, value in state.items():
        _check_name(name)
        tensor = value.data if isinstance(value, EncodedRows) else value
        encoding = Encoding(value.codec, value.shape, value.dtype) if isinstance(value, EncodedRows) else None
        _check_tensor(tensor, name)
        read_as = tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg(), encoding
        key = (tensor.device, tensor.data_ptr(), *read_as)
        if tensor.numel() and key in seen:
            tied[name] = seen[key]
            continue
        seen[key] = name
        tensors.append((name, tensor))
        stored = Stored(tensor.dtype, tuple(tensor.shape))
        entries.append(Entry(name, stored, encoding, partial(_tiles_of, tensor)))
    _check_overlap(tensors)
    return entries, tied


def split_into_shards(entries: Iterable[Entry], limit: int) -> list[list[Entry]]:
    """Entries in order, in groups of up to `limit` bytes. A larger tensor gets a group of its own."""
    groups: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.stored.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.stored.nbytes
    return groups


def size_in_bytes(size: int | str) -> int:
    """5000000000, "5GB" (powers of 1000) or "5GiB" (of 1024)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size if isinstance(size, str) else "")
    if match and match[2].upper() in _UNITS:
        count = int(float(match[1]) * _UNITS[match[2].upper()])
    else:
        count = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if count < 1:
        raise CheckpointError(
            f'max_shard_size={size!r}: expected a number of bytes, or a size such as "5GB", "500MB" or "2GiB".'
        )
    return count


def _as_json(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    if metadata is not None and not isinstance(metadata, Mapping):
        raise CheckpointError(f"metadata: expected a mapping, got {type(metadata).__name__}.")
    try:
        values: dict[str, Any] = json.loads(json.dumps(dict(metadata or {})))
        return values
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"metadata: {error}. It is stored as JSON, which has strings, numbers, lists and mappings. Put tensors "
            "into the state."
        ) from error


def _tiles_of(tensor: Tensor) -> Iterator[Tensor]:
    yield _on_cpu(tensor)


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name == "__metadata__" or not _is_unicode(name):
        raise CheckpointError(f"{name!r} cannot be a tensor's name: names are valid strings other than __metadata__.")


def _is_unicode(name: str) -> bool:
    try:
        return bool(name.encode()) or not name
    except UnicodeEncodeError:
        return False


def _check_tensor(tensor: object, name: str) -> None:
    reason = None
    if isinstance(tensor, Payload):
        reason = (
            "is a Payload, and files hold tensors and EncodedRows. Store its data, a uint8 tensor, and put its codec, "
            "shape and dtype into metadata; or let `narrowcast encode` write it"
        )
    elif not isinstance(tensor, Tensor):
        reason = f"is a {type(tensor).__name__}, and files hold tensors and EncodedRows. Put it into metadata"
    elif type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        reason = f"is a {type(tensor).__name__}, which only its own package can store. Pass the full, plain tensor"
    elif tensor.is_meta:
        reason = "is on the meta device and has no values. Load or initialize the model first"
    elif tensor.layout != torch.strided or tensor.dtype not in NAMES:
        reason = f"is {tensor.dtype}, {tensor.layout}, which safetensors cannot store. Convert it first"
    if reason:
        raise CheckpointError(f"{name!r} {reason}.")


def _check_overlap(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse tensors that certainly share memory: both fill their span without gaps, and the spans overlap."""
    last: tuple[str, object, int] = ("", None, 0)
    dense = [(name, tensor) for name, tensor in tensors if tensor.numel() and _dense(tensor)]
    spans = [(str(tensor.device), tensor.data_ptr(), tensor.nbytes, name) for name, tensor in dense]
    for device, start, size, name in sorted(spans):
        if last[1] == device and start < last[2]:
            raise CheckpointError(
                f"{name!r} and {last[0]!r} share memory but are not the same tensor. Once loaded they would share "
                f"nothing. Store one of them, or set state[{name!r}] = state[{name!r}].clone()."
            )
        last = (name, device, start + size)


def _dense(tensor: Tensor) -> bool:
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return span == tensor.numel()
