"""What tests of engines share: small models, and what was captured."""

from __future__ import annotations

import pytest

from specattn.cuda_graph import GraphRunner
from specattn.speculative.step.level import StepPart
from tests.tiny import TinyDraft, TinyTarget
from tests.worlds import DEVICE


@pytest.fixture(scope="module")
def models() -> tuple[TinyTarget, TinyDraft]:
    return TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)


@pytest.fixture
def captures(monkeypatch) -> list[str]:
    """The parts of steps that are captured, in their order."""
    parts, capture = [], GraphRunner.capture

    def noted(runner: GraphRunner, part: object) -> object:
        if isinstance(part, StepPart):
            parts.append(part.value)
        return capture(runner, part)

    monkeypatch.setattr(GraphRunner, "capture", noted)
    return parts
