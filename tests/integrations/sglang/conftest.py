"""These tests run in SGLang's environments; docs/sglang.md and README.md here say how."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

NEEDS = "sglang"
REASON = "needs SGLang's environment (tests/integrations/sglang/README.md)"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{NEEDS}: {REASON}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("sglang") is not None:
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        return
    for item in items:
        if item.get_closest_marker(NEEDS):
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session")
def active() -> None:
    """The plug-in, loaded as SGLang's processes load it."""
    from sglang.srt.plugins import load_plugins

    from specattn.integrations import sglang

    load_plugins()
    assert sglang.reasons() == []
