"""These tests run in SGLang's environments; docs/sglang.md and README.md here say how."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.integrations.sglang import INSTALLED

NEEDS = "sglang"
REASON = "needs SGLang's environment (tests/integrations/sglang/README.md)"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{NEEDS}: {REASON}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if INSTALLED:
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


OUTCOMES: dict[str, str] = {}
#: Verify forwards of each prompt, by setting and backend.
VERIFIED: dict[str, dict[str, list[int]]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    inside = report.nodeid.startswith("tests/integrations/sglang/")
    if inside and (report.when == "call" or report.outcome != "passed"):
        OUTCOMES[report.nodeid.removeprefix("tests/integrations/sglang/")] = report.outcome
        for name, counts in report.user_properties:
            if name == "verified":
                VERIFIED.update(counts)


def pytest_sessionfinish() -> None:
    """Add what ran to the record that ``SGLANG_RECORD`` names."""
    path = os.environ.get("SGLANG_RECORD")
    if not path or not OUTCOMES:
        return
    file = Path(path)
    record = json.loads(file.read_text()) if file.exists() else {}
    entry = record.setdefault(version("sglang"), {"tests": {}})
    entry["with"] = {name: version(name) for name in ("torch", "triton", "transformers")}
    entry["device"] = "cpu"
    entry["verified"] = dict(sorted((entry.get("verified", {}) | VERIFIED).items()))
    entry["tests"] = dict(sorted((entry["tests"] | OUTCOMES).items()))
    file.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")
