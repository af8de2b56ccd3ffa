"""`narrowcast decode`: the encoded tensors of a file to floats. See shared/payload_files.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from narrowcast.cli.shared.failing import refuse
from narrowcast.cli.shared.places import check_source, check_target

DTYPES = ("float32", "bfloat16", "float16", "float64")


def decode(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A .safetensors file that narrowcast has written.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The .npy or .safetensors file to write.")],
    name: Annotated[str | None, typer.Option(help="Decode only this tensor.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPES)}; by default the tensor's original dtype.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace DST.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a sentence.")] = False,
) -> None:
    """Decode a file of `narrowcast encode`, `narrowcast quantize` or narrowcast.save. Checksums are compared.

    Example: narrowcast decode activations.safetensors activations.npy
    """
    check_source(source, (".safetensors",))
    check_target(target, (".npy", ".safetensors"), source, overwrite)
    if dtype is not None and dtype not in DTYPES:
        refuse(f"--dtype {dtype!r}: is none of {', '.join(DTYPES)}. Write, for example, --dtype float32.")

    import torch

    from narrowcast.cli.shared import payload_files

    summary = payload_files.decode(source, target, name, None if dtype is None else getattr(torch, dtype))
    if as_json:
        print(json.dumps(summary))
        return
    decoded = sum(tensor["codec"] is not None for tensor in summary["tensors"])
    copied = len(summary["tensors"]) - decoded
    sizes = f"{summary['bytes_before']:,} -> {summary['bytes_after']:,} bytes"
    print(f"{target}: {decoded} decoded{f', {copied} copied' if copied else ''}; {sizes}")
