"""`narrowcast encode`: the float tensors of a file to payloads. See shared/payload_files.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from narrowcast.cli.shared.places import check_source, check_target


def encode(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A .npy or .safetensors file.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The .safetensors file to write.")],
    codec: Annotated[str, typer.Option(help="The codec of every float tensor.")] = "int8",
    seed: Annotated[int, typer.Option(help="The seed of codecs that round stochastically.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a sentence.")] = False,
) -> None:
    """Encode every float tensor of a file, to the bytes that narrowcast.encode gives.

    To quantize a model's weights, for layers that compute with them, use `narrowcast quantize`.

    Example: narrowcast encode activations.npy activations.safetensors --codec int4:block=64
    """
    check_source(source, (".npy", ".safetensors"))
    check_target(target, (".safetensors",), source, overwrite)

    from narrowcast.cli.shared import payload_files

    summary = payload_files.encode(source, target, codec, seed)
    if as_json:
        print(json.dumps(summary))
        return
    before, after = summary["bytes_before"], summary["bytes_after"]
    share = f", {after / before:.1%}" if before else ""
    copied = f", {len(summary['copied'])} copied" if summary["copied"] else ""
    encoded = f"{len(summary['tensors'])} encoded in {summary['codec']}"
    print(f"{target}: {encoded}{copied}; {before:,} -> {after:,} bytes{share}")
    for tensor in summary["tensors"]:
        if not tensor["finite"]:
            print(f"{tensor['name']} holds a NaN or an infinity: blocks that hold one decode to NaN.")
