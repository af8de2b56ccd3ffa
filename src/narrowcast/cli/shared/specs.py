"""Lists of codecs, as --codecs takes them."""

from __future__ import annotations

from narrowcast.errors import SpecError


def split_specs(text: str) -> list[str]:
    """ "int8,int4:block=64,scale=bf16,nf4" as three specs: an option without a codec belongs to the one before."""
    specs: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if specs and "=" in part and ":" not in part:
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    if not specs:
        raise SpecError(f"--codecs {text!r}: names no codec. Write, for example, --codecs int8,int4,nf4.")
    return specs
