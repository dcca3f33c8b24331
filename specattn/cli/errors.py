"""Exit codes of the command, and the one line that explains them."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
from contextlib import contextmanager, suppress
from functools import cache
from typing import IO, TYPE_CHECKING, Any, TextIO, cast

import typer
from rich.console import Console
from rich.text import Text

from specattn.cli.torchrun import rank
from specattn.errors import ModelError, SpecAttnError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Exit codes: a mistake in the arguments; memory or disk ran out; the target's logits are not
#: finite; Ctrl-C; a closed pipe (the last two as a shell reports SIGINT and SIGPIPE).
MISTAKE, NO_ROOM, NOT_FINITE, INTERRUPTED, CLOSED_PIPE = 2, 3, 4, 130, 141

_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
# torch's CPU allocator, CUDA and its libraries raise a RuntimeError with one of these in its text
_MEMORY_ERRORS = ("out of memory", "can't allocate memory", "ALLOC_FAILED", "bad_alloc")

# what the library's messages speak of under the option's own name
_SAME = (
    "topk tree ranks page_size draft_sampling temperature top_k top_p min_p repetition_penalty "
    "presence_penalty frequency_penalty logit_bias bad_words logprobs seed max_new_tokens "
    "min_new_tokens stop ignore_eos backend dtype deterministic cudagraph buckets sampled"
)
#: What the library's messages speak of, and the option that sets it.
OPTIONS = {name: f"--{name.replace('_', '-')}" for name in _SAME.split()} | {
    "num_steps": "--steps",
    "num_draft_tokens": "--draft-tokens",
    "max_context_len": "--max-context",
    "max_num_reqs": "--batch-size",
    "stop_token_ids": "--stop-token-id",
    "stop tokens": "--stop-token-id",
    "kv_dtype": "--kv-cache-dtype",
    "load_draft": "--draft-kind eagle3",
    "load_dflash": "--draft-kind dflash",
    "load_lm_draft": "--draft-kind model",
}
# a name that is a word, too, is a field's where something is said of its value
_FIELD = "|".join(
    name if "_" in name else rf"{name}(?= must| needs|=| \d)"
    for name in sorted(OPTIONS, key=len, reverse=True)
)

# ClickException, which Typer does not export; where it is defined depends on Typer's version.
_ParserError: Any = typer.BadParameter.__mro__[2]


class ArgumentError(SpecAttnError):
    """The user gave an ``argument``, as it is written, that cannot be used."""

    def __init__(self, argument: str, message: str) -> None:
        self.argument = argument
        super().__init__(message)


def refuse(*mistakes: tuple[bool, str, str]) -> None:
    """Raise an `ArgumentError` for the first mistake: if it is one, the argument, the message."""
    for is_one, argument, message in mistakes:
        if is_one:
            raise ArgumentError(argument, message)


class NotFiniteError(SpecAttnError):
    """The target's logits were NaN or infinite for some requests."""


class _Droppable:
    """Standard error, which drops what a full disk or a closed pipe cannot take."""

    def write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
        except OSError:
            _discard_what_cannot_be_written(sys.stderr)

    def flush(self) -> None:
        _discard_what_cannot_be_written(sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


@cache
def stderr() -> Console:
    """Return the console for everything but the text: progress, warnings and tables."""
    return Console(file=cast("IO[str]", _Droppable()), highlight=False, quiet=rank() > 0)


def named(message: str) -> str:
    """Return a message of the library with options for what they set."""
    # not in a path, nor in another name
    text = re.sub(rf"(?<![\w/.-])({_FIELD})(?![\w/-])", lambda match: OPTIONS[match[1]], message)
    return re.sub(r"(--[\w-]+)='(\w+)'", r"\1 \2", text)


@contextmanager
def naming_options() -> Iterator[None]:
    """Turn a `ValueError` that speaks of an option's field into an `ArgumentError`."""
    try:
        yield
    except ValueError as error:
        text = named(str(error))
        found = re.search(r"--[\w-]+", text)
        if found is None:
            raise
        option = found[0]
        raise ArgumentError(
            option, text.removeprefix(f"{option} ").replace(f" of {option}", "")
        ) from error


@contextmanager
def exit_codes() -> Iterator[None]:
    """Flush standard output; turn expected errors into a line and a code."""
    streams = sys.stdout, sys.stderr  # the command line parser may wrap them
    try:
        yield
        sys.stdout.flush()
        _discard_what_cannot_be_written(sys.stderr)
    # a SystemExit may come from a library that met a closed pipe
    except BaseException as error:
        code, line = _code_and_line(error)
        # every rank finds the same mistake
        if line and not (code == MISTAKE and rank()):
            with suppress(OSError):  # standard error may be full or closed, too
                print(f"specattn: error: {' '.join(line.split())}", file=sys.stderr, flush=True)
        for stream in streams:
            _discard_what_cannot_be_written(stream)
        raise SystemExit(code) from None


def _code_and_line(error: BaseException) -> tuple[int, str]:
    """Return the exit code and line of an error that is expected."""
    match error:
        case KeyboardInterrupt() | typer.Abort():
            return INTERRUPTED, ""
        case BrokenPipeError():
            return CLOSED_PIPE, ""
        case SystemExit(__context__=BrokenPipeError()):  # rich and click exit with 1
            return CLOSED_PIPE, ""
        case ArgumentError():
            return MISTAKE, f"{error.argument}: {error}"
        case ModelError():
            return MISTAKE, f"--{error.argument}: {named(str(error))}"
        case UnsupportedError():
            return MISTAKE, f"--backend: {named(str(error).removeprefix('backend '))}"
        case NotFiniteError():
            return NOT_FINITE, str(error)
        case SpecAttnError():
            return MISTAKE, str(error)
        case _ParserError():
            return MISTAKE, _usage_line(error)
        case OSError() if error.errno in _DISK_ERRORS:
            return NO_ROOM, f"cannot write {error.filename or 'the output'}: {error.strerror}"
        case _ if is_memory_error(error):
            return NO_ROOM, f"out of memory: {error}"
    raise error


def is_memory_error(error: BaseException) -> bool:
    """Return whether the device or the host has no memory left."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _MEMORY_ERRORS)
    )


def _usage_line(error: Any) -> str:
    """Return the parser's message with the name of the argument first."""
    found = vars(error)
    name = found.get("option_name") or ""
    if found.get("param") is not None:
        param = found["param"]
        name = max(param.opts, key=len) if param.param_type_name == "option" else param.name.upper()
    message = str(found.get("message") or "is missing").rstrip(".").removesuffix(f": {name}")
    if found.get("possibilities"):
        message += f"; did you mean {', '.join(sorted(found['possibilities']))}?"
    message = message[:1].lower() + message[1:]
    return f"{name}: {message}" if name else message


def _discard_what_cannot_be_written(stream: TextIO) -> None:
    """Drop what a closed pipe or a full disk cannot take."""
    # else the interpreter's last flush fails, with a traceback and exit code 120
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        with suppress(OSError, ValueError):  # a test's stream has no file descriptor
            os.dup2(null, stream.fileno())
        os.close(null)


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Show the library's warnings as ``specattn: warning: ...``, each of them once."""
    log, handler = logging.getLogger("specattn"), _OnceHandler(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


class _OnceHandler(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self._shown: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = f"specattn: {record.levelname.lower()}: {record.getMessage()}"
        if line not in self._shown:
            self._shown.add(line)
            stderr().print(Text(line), soft_wrap=True)
