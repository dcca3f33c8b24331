"""Ranks that ``torchrun`` has started: one sharded target, one output."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def world_size() -> int:
    """Return how many processes share the target; 1 without ``torchrun``."""
    # other launchers set WORLD_SIZE as well, and mean other things by it
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def rank() -> int:
    """Return which of these processes this is."""
    return int(os.environ["RANK"]) if world_size() > 1 else 0


def local_rank() -> int:
    """Return which of its machine's processes this is, and so the index of its GPU."""
    return int(os.environ["LOCAL_RANK"])


@contextmanager
def one_output() -> Iterator[None]:
    """Discard what ranks other than 0 write to standard output.

    Ranks leave their process group together, unless one of them fails.
    """
    if rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the end
    yield
    if world_size() > 1:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
