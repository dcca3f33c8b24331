"""Which implementation of the kernel operations a test runs: torch functions or Triton kernels."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Iterator

IMPLEMENTATIONS = ("naive", "triton")


@contextmanager
def using(implementation: str) -> Iterator[None]:
    """Run every operation by one implementation; Triton kernels are interpreted on a CPU."""
    assert implementation in IMPLEMENTATIONS
    triton = implementation == "triton"
    with mock.patch("specattn.kernels.uses_triton", return_value=triton):
        yield
