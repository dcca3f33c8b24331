"""Grammars from options: a JSON schema, or a regular expression."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specattn.cli.errors import ArgumentError, refuse

if TYPE_CHECKING:
    from collections.abc import Callable

    from specattn.cli.loading import Models
    from specattn.speculative.sampling.grammar import Grammar

SCHEMA, REGEX = "--json-schema", "--regex"


@dataclass(frozen=True)
class Pattern:
    """A schema or a regular expression, and the ``option`` that gave it."""

    option: str
    given: dict[str, Any] | str

    def compile(self, models: Models) -> Callable[[], Grammar]:
        """Return what makes the grammar that each text must match."""
        from specattn.integrations.xgrammar import XGrammarCompiler

        try:
            compiler = XGrammarCompiler(models.tokenizer, models.target)
            if isinstance(self.given, str):
                return compiler.regex(self.given)
            return compiler.json_schema(self.given)
        except ValueError as error:
            message = str(error).removeprefix("schema ").removeprefix("pattern ")
            raise ArgumentError(self.option, message) from error


def read_pattern(schema: str | None, regex: str | None, *, ignore_eos: bool) -> Pattern | None:
    """Return what texts must match, if anything.

    A schema is a file, or the JSON object itself.
    """
    option = REGEX if schema is None else SCHEMA
    refuse(
        (None not in (schema, regex), REGEX, f"cannot be combined with {SCHEMA}"),
        (regex == "", REGEX, "must not be empty"),
    )
    given = regex if schema is None else _read_schema(schema)
    if given is None:
        return None
    refuse(
        (ignore_eos, option, "cannot be combined with --ignore-eos: what matches has an end"),
        (find_spec("xgrammar") is None, option, "needs xgrammar (pip install 'specattn[grammar]')"),
    )
    return Pattern(option, given)


def _read_schema(given: str) -> dict[str, Any]:
    text = given
    if not given.strip():
        raise ArgumentError(SCHEMA, f"must be a file or a JSON object, got {given!r}")
    if not given.lstrip().startswith(("{", "[")):
        try:
            text = Path(given).read_text(encoding="utf-8")
        except OSError as error:
            raise ArgumentError(SCHEMA, f"cannot read {given}: {error.strerror}") from error
        except ValueError as error:  # no UTF-8, or no name of a file
            raise ArgumentError(SCHEMA, f"cannot read {given}: {error}") from error
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(SCHEMA, f"is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ArgumentError(SCHEMA, f"must be a JSON object, got {type(found).__name__}")
    return found
