"""Which codec a name gets: rules that map regular expressions to codecs, and the codec of everything else.

A rule's expression is searched for in a name (`re.search`: anywhere in it, unless anchored with `^` or `$`). Rules are
tried in the order in which they were given, and the first that matches decides; where none does, the default decides.
None, or False (TOML has no null), as a codec means: leave the weight as it is. Names are those of modules ("lm_head",
"layers.0.mlp.up_proj", "" for the root), or of parameters that are not called `weight`.

All rules are checked before the first is used, so that a wrong codec in the last one does not stop work half way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from narrowcast.codecs.base import Codec
from narrowcast.codecs.registry import codec as as_codec
from narrowcast.errors import SpecError

CodecLike: TypeAlias = str | Codec | Mapping[str, Any]
"""What `narrowcast.codec` takes."""


class Rules:
    """Expressions and codecs in order. Remembers which of them decided for a name."""

    def __init__(self, rules: Iterable[tuple[re.Pattern[str], Codec | None]], default: Codec | None) -> None:
        self.default = default
        self._rules = tuple(rules)
        self._deciding: set[str] = set()

    def codec_for(self, *names: str) -> Codec | None:
        """The codec of the first rule found in one of a weight's names, else the default. None: leave it as it is."""
        for expression, codec in self._rules:
            if any(expression.search(name) for name in names):
                self._deciding.add(expression.pattern)
                return codec
        return self.default

    @property
    def unused(self) -> list[str]:
        """The expressions that decided for no name so far: a misspelt one, or one behind a wider one."""
        return [expression.pattern for expression, _ in self._rules if expression.pattern not in self._deciding]

    def config(self) -> dict[str, str | None]:
        """The rules as plain values: expression to spec, or None."""
        return {expression.pattern: codec.spec if codec else None for expression, codec in self._rules}


def compile_rules(rules: Mapping[str, CodecLike | bool | None] | None, default: CodecLike | None) -> Rules:
    """Check `rules` and `default`, and make them ready for use."""
    if rules is not None and not isinstance(rules, Mapping):
        raise SpecError(
            f"rules={rules!r}: expected a mapping of regular expressions to codecs or None, got "
            f'{type(rules).__name__}. Write for example {{"lm_head": None, "mlp": "int4:block=128"}}.'
        )
    compiled = [(_expression(pattern), _codec(pattern, value)) for pattern, value in (rules or {}).items()]
    return Rules(compiled, None if default is None else as_codec(default))


def _expression(pattern: object) -> re.Pattern[str]:
    if not isinstance(pattern, str):
        raise SpecError(
            f"rules: the key {pattern!r} is a {type(pattern).__name__}, and keys are regular expressions as strings. "
            'Write for example {"lm_head": None}.'
        )
    try:
        return re.compile(pattern)
    except re.error as error:
        raise SpecError(
            f"rules: {pattern!r} is not a regular expression: {error}. A dot, star or bracket that is meant literally "
            f"is written with a backslash: {re.escape(pattern)!r}."
        ) from error


def _codec(pattern: str, value: object) -> Codec | None:
    if value is None or value is False:
        return None
    try:
        return as_codec(value)  # type: ignore[arg-type]  # what is no codec is refused there
    except SpecError as error:
        leave = "To leave what it matches as it is, write None (false in a file of rules)."
        raise SpecError(f"rules[{pattern!r}]: {error} {leave}") from error
