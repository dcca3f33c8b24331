"""Which implementation of the kernel operations a test runs: torch functions or Triton kernels."""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

IMPLEMENTATIONS = ("naive", "triton")
# of a property of kernels: on a GPU, shapes are compiled
EXAMPLES = 8 if torch.cuda.is_available() else 40


@contextmanager
def using(implementation: str) -> Iterator[None]:
    """Run every operation by one implementation; Triton kernels are interpreted on a CPU."""
    assert implementation in IMPLEMENTATIONS
    triton = implementation == "triton"
    with mock.patch("specattn.kernels.uses_triton", return_value=triton):
        yield


def by_each(check: Callable[..., None]) -> Callable[..., None]:
    """Let a property hold of every implementation: the oracle is that of all."""

    @wraps(check)
    def checked(*args: Any, **drawn: Any) -> None:
        for implementation in IMPLEMENTATIONS:
            with using(implementation):
                check(*args, **drawn)

    return checked
