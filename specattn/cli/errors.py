"""How the command ends: one line for a mistake, nothing for an interrupt or a closed pipe."""

from __future__ import annotations

import logging
import os
import re
import sys
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from specattn.errors import ModelError, SpecAttnError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERRUPTED, CLOSED_PIPE = 130, 141

_OPTIONS = {
    "num_steps": "--steps",
    "topk": "--topk",
    "num_draft_tokens": "--draft-tokens",
    "max_context_len": "--max-context",
    "max_num_reqs": "--batch-size",
    "page_size": "--page-size",
    "draft_sampling": "--draft-sampling",
    "temperature": "--temperature",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "seed": "--seed",
}

# ClickException, which Typer does not export; where it is defined depends on Typer's version.
_ParserError: Any = typer.BadParameter.__mro__[2]


class ArgumentError(SpecAttnError):
    """A command line argument that cannot be used.

    Parameters
    ----------
    argument : str
        As the user writes it, e.g. ``"--topk"``.
    message : str
        What is wrong with it and what would be right.
    """

    def __init__(self, argument: str, message: str) -> None:
        self.argument = argument
        super().__init__(message)


@cache
def stderr() -> Console:
    """Return the console for everything but the text: progress, warnings and tables."""
    return Console(stderr=True, highlight=False)


@contextmanager
def naming_options() -> Iterator[None]:
    """Turn a configuration's `ValueError`, which begins with the field's name, into an option's."""
    try:
        yield
    except ValueError as error:
        pattern = rf"\b({'|'.join(_OPTIONS)})\b"
        text = re.sub(pattern, lambda match: _OPTIONS[match[0]], str(error))
        argument, message = text.split(" ", 1)
        raise ArgumentError(argument, message) from error


@contextmanager
def quiet_ends() -> Iterator[None]:
    """Exit with 2 and one line for a mistake, quietly for an interrupt or a closed pipe."""
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(CLOSED_PIPE) from None
    except ArgumentError as error:
        refuse(error.argument, str(error))
    except ModelError as error:
        refuse(f"--{error.argument}", str(error))
    except UnsupportedError as error:
        refuse("--backend", str(error).removeprefix("backend "))
    except SpecAttnError as error:
        refuse("", str(error))


def refuse(argument: str, message: str) -> NoReturn:
    """Print one line to standard error and exit with 2."""
    line = " ".join(message.split())
    print("specattn: error: " + (f"{argument}: {line}" if argument else line), file=sys.stderr)
    raise SystemExit(2)


def refuse_usage(error: Exception) -> NoReturn:
    """Refuse what the command line parser refused, in one line that names the argument."""
    found = vars(error)
    name = found.get("option_name") or ""
    if found.get("param") is not None:
        param = found["param"]
        name = max(param.opts, key=len) if param.param_type_name == "option" else param.name.upper()
    message = str(found.get("message") or "is missing").rstrip(".").removesuffix(f": {name}")
    if found.get("possibilities"):
        message += f"; did you mean {', '.join(sorted(found['possibilities']))}?"
    refuse(name, message[:1].lower() + message[1:])


def is_usage_error(error: BaseException) -> bool:
    """Whether the command line parser raised ``error``."""
    return isinstance(error, _ParserError)


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


def _discard_output() -> None:
    """Keep the interpreter's last flush from meeting the closed pipe again."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        # a test's stream has no file descriptor
        with suppress(OSError, ValueError):
            os.dup2(null, stream.fileno())
    os.close(null)
