"""Text to tokens and back, with the tokenizer that lies beside a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from narrowcast.errors import MissingFileError

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""How a tokenizer shows bytes that are the beginning of a character."""


class Text:
    """The tokenizer of a folder."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise MissingFileError(
                f"{folder}: has no tokenizer that transformers can read ({str(error).splitlines()[0]}). Copy "
                "tokenizer.json and tokenizer_config.json of the model into the folder."
            ) from error

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer(text)["input_ids"]
        return tokens

    def decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


class Stream:
    """The text of a growing list of tokens, in pieces that can be printed: no character comes in halves."""

    def __init__(self, text: Text) -> None:
        self._text, self._tokens, self._shown = text, list[int](), ""

    def add(self, token: int) -> str:
        """What one more token adds to the text, as far as it is certain."""
        self._tokens.append(token)
        whole = self._text.decode(self._tokens)
        if whole.endswith(UNFINISHED):
            return ""
        return self._show(whole)

    def end(self) -> str:
        """What is left."""
        return self._show(self._text.decode(self._tokens))

    def _show(self, whole: str) -> str:
        new, self._shown = whole[len(self._shown) :], whole
        return new
