"""The options that codecs have in common: what a spec may say of them, and how a spec spells them."""

from __future__ import annotations

from narrowcast.errors import SpecError
from narrowcast.kernels.layout import ROW, Scale

SCALES = {"fp32": Scale.FP32, "bf16": Scale.BF16, "fp16": Scale.FP16, "e8m0": Scale.E8M0}
MAX_BLOCK = 65536


def default_block(bits: int) -> int:
    """Elements per scale; docs/defaults.md has the measurement."""
    return 64 if bits <= 4 else 128


def default_scale(bits: int) -> str:
    """How scales are stored; docs/defaults.md has the measurement."""
    return "bf16" if bits <= 4 else "fp32"


def parse_block(value: object, name: str) -> int:
    """The `Format.block` that the option `block=` of codec `name` stands for."""
    if value == "row":
        return ROW
    if isinstance(value, bool) or not isinstance(value, int) or not 8 <= value <= MAX_BLOCK or value % 8:
        raise SpecError(
            f"block={value!r} of codec {name!r}: a block is a multiple of 8 from 8 to {MAX_BLOCK} elements, or "
            f'"row" for one scale per row. Write for example "{name}:block=64" or "{name}:block=row".'
        )
    return value


def parse_scale(value: object, name: str) -> Scale:
    """The `Format.scale` that the option `scale=` of codec `name` stands for."""
    if not isinstance(value, str) or value not in SCALES:
        raise SpecError(
            f"scale={value!r} of codec {name!r}: scales are stored as {', '.join(SCALES)}. "
            f'Write for example "{name}:scale=bf16".'
        )
    return SCALES[value]


def parse_flag(value: object, option: str, name: str) -> bool:
    """An option that is true or false."""
    if not isinstance(value, bool):
        raise SpecError(f'{option}={value!r} of codec {name!r}: write "{option}=true" or leave it out.')
    return value


def non_default(**pairs: tuple[object, object]) -> dict[str, object]:
    """The options, out of `option=(value, default)`, whose value is not the default."""
    return {option: value for option, (value, default) in pairs.items() if value != default}


def write_spec(name: str, given: dict[str, object]) -> str:
    """The spec of a codec: its name, and the options that were given."""
    listed = ",".join(f"{key}={_spell(value)}" for key, value in given.items())
    return f"{name}:{listed}" if listed else name


def _spell(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "|".join(repr(item) for item in value)
    return str(value)
