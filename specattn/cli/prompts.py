"""Where prompts come from: an argument, standard input, or a file of many."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specattn.cli.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PROMPT, PROMPTS = "PROMPT", "--prompts"


@dataclass(frozen=True)
class Prompts:
    """Texts to continue, none of them empty.

    Parameters
    ----------
    texts : tuple of str
        At least one.
    batch : bool
        Whether they came from a file of prompts.
    """

    texts: tuple[str, ...]
    batch: bool

    def blame(self, index: int, what: str) -> ArgumentError:
        """Return the error that says ``what`` is wrong with prompt ``index``."""
        if self.batch:
            return ArgumentError(PROMPTS, f"prompt {index + 1} {what}")
        return ArgumentError(PROMPT, f"the prompt {what}")

    def encode(self, tokenizer: Any, vocab_size: int, limit: int) -> list[list[int]]:
        """Return the token ids of every prompt.

        Raises
        ------
        ArgumentError
            If a prompt does not fit into ``limit`` tokens, or one is not of the target's
            ``vocab_size`` tokens: tokenizers may know more of them.
        """
        encoded = [list(tokenizer(text).input_ids) for text in self.texts]
        for index, ids in enumerate(encoded):
            if not ids:
                raise self.blame(index, "has no tokens")
            if len(ids) > limit:
                raise self.blame(index, f"has {len(ids)} tokens, the context holds {limit}")
            if max(ids) >= vocab_size:
                raise self.blame(
                    index,
                    f"has the token {max(ids)} by the target's tokenizer; the target has "
                    f"{vocab_size} tokens",
                )
        return encoded


def read_prompts(prompt: str | None, file: Path | None) -> Prompts:
    """Return the prompt given as an argument or piped in, or those of a file.

    Standard input loses one final newline, so that ``echo x |`` and ``x`` mean the same.

    Raises
    ------
    ArgumentError
        If there is no prompt, two sources, an empty prompt, or bytes that are not UTF-8.
    """
    if file is not None:
        if prompt is not None:
            raise ArgumentError(PROMPTS, "cannot be combined with a prompt argument")
        found = Prompts(tuple(_read_many(file)), batch=True)
    else:
        found = Prompts((_read_one(prompt),), batch=False)
    for index, text in enumerate(found.texts):
        if not text:
            raise found.blame(index, "is empty")
        # JSON can spell them
        if lone := next((sign for sign in text if "\ud800" <= sign <= "\udfff"), ""):
            raise found.blame(index, f"is no text: it has half of a character, {lone!a}")
    return found


def _read_one(prompt: str | None) -> str:
    if prompt is None and (_stdin_is_closed() or sys.stdin.isatty()):
        raise ArgumentError(
            PROMPT, "is missing; give a text, - to read standard input, or --prompts FILE"
        )
    if prompt is None or prompt == "-":
        text = _decode(PROMPT, _read_stdin(PROMPT))
        return text.removesuffix("\n").removesuffix("\r")
    # Python keeps an argument's undecodable bytes as lone surrogates
    return _decode(PROMPT, prompt.encode("utf-8", "surrogateescape"))


def _read_many(file: Path) -> Sequence[str]:
    try:
        data = _read_stdin(PROMPTS) if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise ArgumentError(PROMPTS, f"cannot read {file}: {error.strerror}") from error
    text = _decode(PROMPTS, data).removeprefix("\ufeff")
    listed = _json_list(text)
    if listed is not None:
        return listed
    if file.suffix == ".json":
        raise ArgumentError(PROMPTS, f"{file} is not a JSON list of strings")
    lines = text.rstrip("\r\n").split("\n")
    if lines == [""]:
        raise ArgumentError(PROMPTS, f"{file} holds no prompts")
    return [line.removesuffix("\r") for line in lines]


def _read_stdin(argument: str) -> bytes:
    if _stdin_is_closed():
        raise ArgumentError(argument, "standard input is closed")
    return sys.stdin.buffer.read()


def _stdin_is_closed() -> bool:
    """Whether there was no standard input when Python started: it is None then."""
    return not sys.stdin


def _json_list(text: str) -> list[str] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # lists nested too deeply are no list of prompts either
        return None
    if isinstance(found, list) and found and all(isinstance(item, str) for item in found):
        return found
    return None


def _decode(argument: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise ArgumentError(
            argument, f"is not UTF-8 (byte 0x{byte:02x} at offset {error.start})"
        ) from error
