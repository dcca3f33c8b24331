"""Both implementations of the public operations, for the tests of kernels."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["naive", "triton"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with torch functions and with Triton kernels (in the interpreter on a CPU)."""
    monkeypatch.setattr("specattn.kernels.uses_triton", lambda device: request.param == "triton")
    return request.param
