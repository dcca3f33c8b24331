"""A captured decoder, and what its good step gives."""

from __future__ import annotations

import pytest

from tests.validation.steps import Failing, step_of


@pytest.fixture(autouse=True)
def _calm():
    Failing.fails = None
    Failing.ran.clear()


@pytest.fixture(scope="session")
def step():
    return step_of()


@pytest.fixture(scope="session")
def wanted():
    return step_of().outcome()
