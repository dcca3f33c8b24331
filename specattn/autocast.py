"""Keeps ``torch.autocast`` out: what runs has the dtype of its weights."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


def without_autocast(run: Callable[P, T]) -> Callable[P, T]:
    """Let a function run as outside of ``torch.autocast``.

    Inside, products would have another dtype than the caches of keys and values; and weights that
    autocast has converted are gone when a graph that was captured over them is replayed.
    """

    @wraps(run)
    def plain(*args: P.args, **kwargs: P.kwargs) -> T:
        for kind in ("cuda", "cpu"):
            if torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    return plain(*args, **kwargs)
        return run(*args, **kwargs)

    return plain
