"""Prompts of an argument, of standard input, or of a file."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specattn.cli.errors import ArgumentError, NotFiniteError
from specattn.cli.torchrun import world_size

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from specattn.engine.request import RequestOutput

PROMPT, PROMPTS = "PROMPT", "--prompts"
CHAT, SYSTEM = "--chat", "--system"


@dataclass(frozen=True)
class Prompts:
    """Texts to continue, none of them empty, perhaps from a file of them.

    With ``chat`` they are messages to answer, after the message ``system`` if there is one. Each
    has ``samples`` requests, one after the other.
    """

    texts: tuple[str, ...]
    batch: bool
    chat: bool = False
    system: str | None = None
    samples: int = 1

    def label(self, request: int) -> str:
        """Return the number of a request's prompt, and of its sample."""
        number, sample = divmod(request, self.samples)
        return f"{number + 1}.{sample + 1}" if self.samples > 1 else f"{number + 1}"

    def blame(self, index: int, what: str) -> ArgumentError:
        """Return the error that says ``what`` is wrong with prompt ``index``."""
        if self.batch:
            return ArgumentError(PROMPTS, f"prompt {index + 1} {what}")
        return ArgumentError(PROMPT, f"the prompt {what}")

    def encode(self, tokenizer: Any, vocab_size: int, limit: int) -> list[list[int]]:
        """Return the token ids of every prompt.

        A prompt must fit into ``limit`` tokens, and have none but the target's ``vocab_size``:
        tokenizers may know more of them.
        """
        if self.chat and not tokenizer.chat_template:
            raise ArgumentError(CHAT, "the target's tokenizer has no chat template")
        encoded = [self._ids(tokenizer, text) for text in self.texts]
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

    def _ids(self, tokenizer: Any, text: str) -> list[int]:
        """Return the token ids of a text, or of a chat up to where the answer begins."""
        if not self.chat:
            return list(tokenizer(text).input_ids)
        messages = [{"role": "user", "content": text}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        try:
            found = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True
            )
        # a template is a program of the tokenizer's: it raises what it likes
        except Exception as error:
            argument = CHAT if self.system is None else SYSTEM
            raise ArgumentError(argument, f"the target's chat template fails: {error}") from error
        return list(found["input_ids"])

    def check_finite(self, results: Sequence[RequestOutput]) -> None:
        """Raise an error that names prompts which the target's logits ended."""
        ends = [one.finish_reason for one in results]
        broken = [self.label(at) for at, end in enumerate(ends) if end == "nonfinite"]
        if broken:
            which = f"after prompt {', '.join(broken)} " if len(ends) > 1 or self.batch else ""
            raise NotFiniteError(
                f"the target's logits {which}are NaN or infinite; the text ends there"
            )


def read_prompts(
    prompt: str | None,
    file: Path | None,
    *,
    chat: bool = False,
    system: str | None = None,
    samples: int = 1,
) -> Prompts:
    """Return the prompts of an argument, standard input or a file.

    Standard input loses one final newline, so that ``echo x |`` and ``x`` mean the same.
    """
    if system is not None:
        if not chat:
            raise ArgumentError(SYSTEM, "needs --chat: a text to continue has no system message")
        system = _argument(SYSTEM, system)
    if file is not None and prompt is not None:
        raise ArgumentError(PROMPTS, "cannot be combined with a prompt argument")
    texts = [_read_one(prompt)] if file is None else _read_many(file)
    found = Prompts(tuple(texts), file is not None, chat, system, samples)
    for index, text in enumerate(found.texts):
        if not text:
            raise found.blame(index, "is empty")
        # JSON can spell them
        if lone := next((sign for sign in text if "\ud800" <= sign <= "\udfff"), ""):
            raise found.blame(index, f"is no text: it has half of a character, {lone!a}")
    return found


def _read_one(prompt: str | None) -> str:
    # Python sets standard input to None where it starts without one
    if prompt is None and (not sys.stdin or sys.stdin.isatty()):
        raise ArgumentError(
            PROMPT, "is missing; give a text, - to read standard input, or --prompts FILE"
        )
    if prompt is None or prompt == "-":
        text = _decode(PROMPT, _read_stdin(PROMPT))
        return text.removesuffix("\n").removesuffix("\r")
    return _argument(PROMPT, prompt)


def _argument(name: str, text: str) -> str:
    """Return an argument's text, which has to be UTF-8."""
    # Python keeps an argument's undecodable bytes as lone surrogates
    return _decode(name, text.encode("utf-8", "surrogateescape"))


def _read_many(file: Path) -> Sequence[str]:
    try:
        data = _read_stdin(PROMPTS) if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise ArgumentError(PROMPTS, f"cannot read {file}: {error.strerror}") from error
    text = _decode(PROMPTS, data).removeprefix("\ufeff")
    if file.suffix == ".jsonl":
        found = [
            _json_line(line, f"line {number} of {file}")
            for number, line in enumerate(text.split("\n"), 1)
            if line.strip()
        ]
    elif file.suffix == ".json":
        found = _json_list(text, str(file))
    else:
        found = _list_or_lines(text)
    if not found:
        raise ArgumentError(PROMPTS, f"{file} holds no prompts")
    return found


def _read_stdin(argument: str) -> bytes:
    if not sys.stdin:
        raise ArgumentError(argument, "standard input is closed")
    if world_size() > 1:
        raise ArgumentError(argument, "cannot be standard input under torchrun: ranks share it")
    return sys.stdin.buffer.read()


def _list_or_lines(text: str) -> list[str]:
    """Return the prompts of a JSON list or of lines."""
    with suppress(ArgumentError):
        if listed := _json_list(text, ""):
            return listed
    lines = text.rstrip("\r\n").split("\n")
    return [line.removesuffix("\r") for line in lines] if lines != [""] else []


def _json_list(text: str, name: str) -> list[str]:
    """Return the prompts of a JSON list, perhaps none."""
    found = _json(text, name)
    if isinstance(found, list) and all(isinstance(item, str) for item in found):
        return found
    raise ArgumentError(PROMPTS, f"{name} is not a JSON list of strings")


def _json_line(text: str, name: str) -> str:
    """Return the prompt of a line of a ``.jsonl`` file."""
    found = _json(text, name)
    if isinstance(found, dict):
        found = found.get("prompt")
    if isinstance(found, str):
        return found
    raise ArgumentError(PROMPTS, f'{name} is neither a string nor an object with a "prompt" string')


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.pos}"
    except (ValueError, RecursionError) as error:  # numbers too long, lists nested too deeply
        reason = str(error)
    raise ArgumentError(PROMPTS, f"{name} is not JSON: {reason}")


def _decode(argument: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = data[error.start]
        raise ArgumentError(
            argument, f"is not UTF-8 (byte 0x{byte:02x} at offset {error.start})"
        ) from error
