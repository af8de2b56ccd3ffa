"""Triton's interpreter, without the work that it does over and over again.

It replaces the functions of `triton.language` by its own when a kernel starts, and again at every call of a function
of the kernel's, where what is there already gets one more wrapping that is never taken off: the hundredth call goes
through a hundred of them. Once is enough. No number changes: what is called at the bottom is the same.
"""

from __future__ import annotations

import types
from typing import Any


def patch_language_once() -> None:
    """Let the interpreter replace the language's functions once for each launch of a kernel."""
    from triton import language
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # an older Triton: slow, and right
        return
    everything = types.SimpleNamespace(__globals__={"language": language, "core": language.core})
    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope()
    restore = interpreter._LangPatchScope.restore
    launched: list[Any] = []

    def once(function: Any) -> Any:
        if launched:
            return nothing
        launched.append(patch(everything))
        return launched[0]

    def restored(scope: Any) -> None:
        restore(scope)
        if launched and scope is launched[0]:
            launched.clear()

    interpreter._patch_lang = once
    interpreter._LangPatchScope.restore = restored
