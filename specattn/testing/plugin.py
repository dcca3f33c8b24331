"""The kit in pytest: one test per check.

In the top ``conftest.py``: ``pytest_plugins = ["specattn.testing.plugin"]``; in a test module:
``test_conformance = backend_suite("mine")``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from specattn.errors import UnsupportedError
from specattn.testing.kit import LEVELS, Check, Level, conformance

if TYPE_CHECKING:
    from collections.abc import Callable

    from specattn.backends.base import BackendFactory


def backend_suite(
    backend: str | BackendFactory,
    device: torch.device | str | None = None,
    level: Level = "quick",
    **options: Any,
) -> Callable[[Check], None]:
    """Return a test function that the plugin runs once per check.

    Parameters
    ----------
    backend : str or BackendFactory
        A registered name, a backend's class, or a composite.
    device : torch.device or str, optional
        A CUDA device if there is one, else the CPU.
    level : {"smoke", "quick", "full"}
        How much; ``pytest --conformance-level`` goes before it.
    **options
        Of `specattn.testing.conformance`.
    """
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")

    def test_conformance(conformance_check: Check) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # shapes so small that others only wait, 20 times as long
        try:
            conformance_check()
        except UnsupportedError as error:
            pytest.skip(str(error))
        finally:
            torch.set_num_threads(threads)

    def checks(chosen: Level | None) -> list[Check]:
        return list(conformance(backend, where, chosen or level, **options))

    test_conformance.conformance_checks = checks  # type: ignore[attr-defined]
    return test_conformance


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--conformance-level``."""
    parser.addoption(
        "--conformance-level", choices=list(LEVELS), help="of every backend's conformance suite"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Turn every function of `backend_suite` into one test per check."""
    checks = getattr(metafunc.function, "conformance_checks", None)
    if checks is None:
        return
    # without the option where only a test module names the plugin
    level = metafunc.config.getoption("--conformance-level", default=None)
    try:
        params = [pytest.param(check, id=check.name) for check in checks(level)]
    except UnsupportedError as error:
        skip = pytest.mark.skip(reason=str(error))
        params = [pytest.param(None, id="unsupported", marks=skip)]
    metafunc.parametrize("conformance_check", params)
