"""Importing the packages that backends are of, which may be missing, or there and broken."""

from __future__ import annotations

from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any

from specattn.errors import UnsupportedError


def installed(module: str) -> bool:
    """Whether ``module`` can be found, without importing its parent packages."""
    first, *rest = module.split(".")
    name, spec = first, find_spec(first)
    for part in rest:
        name = f"{name}.{part}"
        spec = spec and PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec is not None


def imported(target: str, backend: str) -> Any:
    """Import ``module`` or ``module:attribute`` for a backend.

    Raises
    ------
    UnsupportedError
        With whatever the import raised: a package built for another system raises an OSError or
        a RuntimeError where one that is not there raises an ImportError.
    """
    module, _, attribute = target.partition(":")
    try:
        found = import_module(module)
        return getattr(found, attribute) if attribute else found
    except Exception as error:
        raise UnsupportedError(
            f"backend {backend!r}", [f"{target} cannot be imported: {error}"]
        ) from error
