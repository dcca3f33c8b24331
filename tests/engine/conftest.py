"""What tests of engines share: small models, and what was captured."""

from __future__ import annotations

import pytest

from specattn.cuda_graph import GraphRunner
from tests.tiny import TinyDraft, TinyTarget
from tests.worlds import DEVICE


@pytest.fixture(scope="module")
def models() -> tuple[TinyTarget, TinyDraft]:
    return TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)


@pytest.fixture
def captures(monkeypatch) -> list[str]:
    """The parts that are captured, in their order."""
    parts, capture = [], GraphRunner.capture
    monkeypatch.setattr(
        GraphRunner,
        "capture",
        lambda runner, part: (parts.append(part.value), capture(runner, part))[1],
    )
    return parts
