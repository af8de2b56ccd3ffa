"""`narrowcast encode` and `narrowcast decode`: tensors of a file to payloads, and back. See payload_files.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from narrowcast.cli.failing import refuse
from narrowcast.cli.places import check_source, check_target

DTYPES = ("float32", "bfloat16", "float16", "float64")


def encode(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A .npy or .safetensors file.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The .safetensors file to write.")],
    codec: Annotated[str, typer.Option(help="The codec of every float tensor.")] = "int8",
    seed: Annotated[int, typer.Option(help="Of codecs that round stochastically.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a sentence.")] = False,
) -> None:
    """Encode every float tensor of a file, to the bytes that narrowcast.encode gives.

    A model's weights, which layers multiply with as they are, are for `narrowcast quantize`.

    Example: narrowcast encode activations.npy activations.safetensors --codec int4:block=64
    """
    check_source(source, (".npy", ".safetensors"))
    check_target(target, (".safetensors",), source, overwrite)

    from narrowcast.cli import payload_files

    summary = payload_files.encode(source, target, codec, seed)
    if as_json:
        print(json.dumps(summary))
        return
    share = f", {summary['bytes_after'] / summary['bytes_before']:.1%}" if summary["bytes_before"] else ""
    copied = f", {len(summary['copied'])} copied" if summary["copied"] else ""
    print(f"{target}: {len(summary['tensors'])} encoded in {summary['codec']}{copied}; {_sizes(summary)}{share}")
    for tensor in summary["tensors"]:
        if not tensor["finite"]:
            print(f"{tensor['name']} holds a NaN or an infinity: blocks that hold one decode to NaN.")


def decode(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A .safetensors file that narrowcast has written.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The .npy or .safetensors file to write.")],
    name: Annotated[str | None, typer.Option(help="Decode this tensor alone.")] = None,
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; by default as it was.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a sentence.")] = False,
) -> None:
    """Decode what `narrowcast encode`, `narrowcast quantize` or narrowcast.save has written. Checksums are compared.

    Example: narrowcast decode activations.safetensors activations.npy
    """
    check_source(source, (".safetensors",))
    check_target(target, (".npy", ".safetensors"), source, overwrite)
    if dtype is not None and dtype not in DTYPES:
        refuse(f"--dtype {dtype!r}: floats are {', '.join(DTYPES)}. Write, for example, --dtype float32.")

    import torch

    from narrowcast.cli import payload_files

    summary = payload_files.decode(source, target, name, None if dtype is None else getattr(torch, dtype))
    if as_json:
        print(json.dumps(summary))
        return
    decoded = sum(tensor["codec"] is not None for tensor in summary["tensors"])
    copied = len(summary["tensors"]) - decoded
    print(f"{target}: {decoded} decoded{f', {copied} copied' if copied else ''}; {_sizes(summary)}")


def _sizes(summary: dict[str, int]) -> str:
    return f"{summary['bytes_before']:,} -> {summary['bytes_after']:,} bytes"
