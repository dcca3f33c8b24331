"""Every test of the command line loads the pair at most once."""

from __future__ import annotations

import pytest

from specattn.cli import loading
from tests.cli.command import loaded


@pytest.fixture(autouse=True)
def _load_once(monkeypatch):
    monkeypatch.delenv("SPECATTN_BACKEND", raising=False)
    monkeypatch.setattr(loading, "load_models", loaded)
