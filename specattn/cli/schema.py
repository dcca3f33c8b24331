"""JSON schemas that texts must match."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specattn.cli.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from specattn.cli.loading import Models
    from specattn.speculative.grammar import Grammar

OPTION = "--json-schema"


def read_schema(given: str, *, ignore_eos: bool) -> dict[str, Any]:
    """Return the schema of a file, or of the JSON object itself."""
    if ignore_eos:
        raise ArgumentError(OPTION, "cannot be combined with --ignore-eos: a value has an end")
    text = given
    if not given.lstrip().startswith("{"):
        try:
            text = Path(given).read_text(encoding="utf-8")
        except OSError as error:
            raise ArgumentError(OPTION, f"cannot read {given}: {error.strerror}") from error
        except ValueError as error:  # no UTF-8, or no name of a file
            raise ArgumentError(OPTION, f"cannot read {given}: {error}") from error
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(OPTION, f"is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ArgumentError(OPTION, f"must be a JSON object, got {type(found).__name__}")
    if find_spec("xgrammar") is None:
        raise ArgumentError(OPTION, "needs xgrammar (pip install 'specattn[grammar]')")
    return found


def compile_schema(schema: dict[str, Any], models: Models) -> Callable[[], Grammar]:
    """Return what makes the grammar that each text must match."""
    from specattn.integrations.xgrammar import XGrammarCompiler

    try:
        return XGrammarCompiler(models.tokenizer, models.target).json_schema(schema)
    except ValueError as error:
        raise ArgumentError(OPTION, str(error).removeprefix("schema ")) from error
