"""Export to compressed-tensors' pack-quantized format, which vLLM, transformers and others read.

The format holds the weights of Linear modules: integers of 4 or 8 bits, a scale for each row or for each group of
columns that divides the row, and optionally a zero point for each scale. So `int4` and `int8` fit, with any scale type
and with `zero_point=true`. Other codecs are refused with an `ExportError` before anything is written.

The integers are those of the rows, bit for bit. Scales are written as fp32, so that the package decodes a weight to the
same fp32 values as the codec (zeros may come back as -0, since scales may be negative). Many programs cast scales to
the model's dtype when they load them. That changes nothing for the bf16 scales of `int4` in a bf16 model. fp32 scales
are rounded then, which moves each weight by up to 2**-8 of its value in bf16; `scale_dtype=` rounds here instead, in
smaller files.

Programs that read the format look for packed weights in Linear modules. So encoded embeddings, the weights tied to
them, and weights of other modules are written as the floats that they decode to; `export` returns their names. GPT-2's
Conv1D and tied Linear weights are refused.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowcast.checkpoint.selection import module_name
from narrowcast.codecs.payload import EncodedRows
from narrowcast.codecs.tiles import tiles
from narrowcast.errors import ExportError
from narrowcast.integrations.export_sources import State, decode_others, leave_out, open_source, untied
from narrowcast.kernels.layout import ROW, Element, layout

try:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from huggingface_hub import save_torch_state_dict
except ImportError as error:
    raise ImportError(
        "narrowcast.integrations.compressed_tensors needs the package compressed-tensors. "
        "Run: pip install 'narrowcast[hf]'"
    ) from error

WIDTHS = (4, 8)
"""Other widths were packed in other ways by earlier versions of the package, and vLLM has no kernels for them."""


class Scheme(NamedTuple):
    """How the package describes a weight."""

    bits: int
    group: int | None
    """Columns per scale; None for one scale per row."""
    symmetric: bool


def export(
    source: torch.nn.Module | State | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    scale_dtype: torch.dtype = torch.float32,
    max_shard_size: int | str = "5GB",
) -> dict[str, str]:
    """Write a quantized model as a folder of compressed-tensors: safetensors files and a config.json.

    `source` is a model that `quantize_` converted, a folder that `narrowcast quantize` or `save` wrote, or a mapping of
    names to tensors and encoded rows, all of Linear modules. A transformers config goes along. So do the tokenizer and
    the other small files of a folder; beside a model, they are yours to copy.

    Returns the encoded weights that were written as floats, and why. Everything is checked before a file is written.
    """
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ExportError(f"path={str(path)!r}: an export needs a new or empty folder. Choose another, or empty it.")
    opened = open_source(source)
    state, decoded = decode_others(opened.state, opened.others)
    state = untied(state)
    schemes = {name: _scheme(name, rows) for name, rows in state.items() if isinstance(rows, EncodedRows)}
    if not schemes:
        raise ExportError(
            "source: no weight of a Linear module in it is quantized by narrowcast. Call narrowcast.quantize_(model) "
            "first."
        )
    described = _describe(state, schemes, opened.linears, opened.modules)
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, EncodedRows):
            tensors |= packed(name, value, scale_dtype)
        else:
            tensors[name] = value
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size, metadata={"format": "pt"})
    for name in opened.companions:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(source) / name, folder / name)  # type: ignore[arg-type]  # only a folder has companions
    text = json.dumps({**opened.config, "quantization_config": described}, indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n")
    return decoded


def packed(name: str, rows: EncodedRows, scale_dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The tensors that a weight becomes: `name` ends in "weight", they in "weight_packed", "weight_scale" and so on."""
    scheme = _scheme(name, rows)
    half = 1 << (scheme.bits - 1)
    words, scales, zero_points = [], [], []
    for start, stop in tiles(len(rows.data), rows.numel):
        tile = rows.codec.split(rows.data[start:stop], rows.numel)
        assert tile.scales is not None
        codes = tile.codes
        if tile.zero_points is not None:  # affine codes count from 0; the package wants integers from -half to half - 1
            codes = codes.to(torch.int16) - half
            zero_points.append((tile.zero_points.to(torch.int16) - half).to(torch.int8))
        words.append(pack_to_int32(codes.to(torch.int8), scheme.bits))
        scales.append(tile.scales.to(scale_dtype))
    tensors = {
        f"{name}_packed": torch.cat(words),
        f"{name}_scale": torch.cat(scales),
        f"{name}_shape": torch.tensor(rows.shape, dtype=torch.int64, device="cpu"),
    }
    if zero_points:
        tensors[f"{name}_zero_point"] = pack_to_int32(torch.cat(zero_points), scheme.bits, packed_dim=0).clone(
            memory_format=torch.contiguous_format
        )
    return tensors


def _scheme(name: str, rows: EncodedRows) -> Scheme:
    codec, format = rows.codec, rows.codec.format
    if len(rows.shape) != 2 or not name.endswith("weight"):
        raise ExportError(
            f"{name}: pack-quantized holds the 2-D weights of Linear modules, and this one is "
            f"{list(rows.shape)}. {leave_out(name)}"
        )
    if format.element not in (Element.INT, Element.AFFINE) or format.bits not in WIDTHS:
        raise ExportError(
            f'{name}: codec {codec.spec!r} has no place in pack-quantized. Those that do are "int4" and "int8", with '
            f"any block that divides the row, any scale, and zero_point=true or not. {leave_out(name)}"
        )
    where = layout(format, rows.numel)
    if where.blocks > 1 and rows.numel % where.block_size:
        fit = [block for block in (256, 128, 64, 32, 16, 8) if not rows.numel % block]
        other = f"block={fit[0]}" if fit else "block=row"
        raise ExportError(
            f"{name}: its rows of {rows.numel} are not a whole number of blocks of {where.block_size}, and "
            f'pack-quantized has no short blocks. Quantize it with "{codec.name}:{other}", for one. {leave_out(name)}'
        )
    # A block that is longer than the row is one scale per row, as is block=row.
    grouped = format.block != ROW and rows.numel % where.block_size == 0
    return Scheme(format.bits, where.block_size if grouped else None, not format.affine)


def _describe(
    state: State, schemes: Mapping[str, Scheme], linears: set[str] | None, modules: Mapping[str, str]
) -> dict[str, Any]:
    """The `quantization_config` of a config.json."""
    groups: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(scheme, []).append(modules.get(name, module_name(name)))
    left = {module_name(name) for name, value in state.items() if isinstance(value, Tensor) and value.dim() == 2}
    schemes_by_group = {}
    for number, (scheme, names) in enumerate(groups.items()):
        # "Linear" stands for all of them, as most programs that read such folders expect; with several schemes, or
        # embeddings among the quantized, each module is named.
        alone = len(groups) == 1 and linears is not None and set(names) <= linears
        weights = QuantizationArgs(
            num_bits=scheme.bits,
            type="int",
            symmetric=scheme.symmetric,
            strategy="group" if scheme.group else "channel",
            group_size=scheme.group,
        )
        schemes_by_group[f"group_{number}"] = QuantizationScheme(
            targets=["Linear"] if alone else sorted(names), weights=weights, format="pack-quantized"
        )
    ignored = (linears or left | {"lm_head"}) - {name for names in groups.values() for name in names}
    config = QuantizationConfig(
        config_groups=schemes_by_group,
        format="pack-quantized",
        quantization_status="compressed",
        ignore=sorted(ignored),
    )
    return {"version": version("compressed-tensors"), **json.loads(config.model_dump_json())}
