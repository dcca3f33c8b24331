"""The ranks of a sharded target, which take the same steps.

Every rank's host decides for itself what a step runs; forwards with collectives go wrong, or never
end, unless all decide alike. So what comes from outside is compared, and what may depend on
measured times is decided once. A target of one process has nobody to ask: its group is None.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from specattn.errors import RankError
from specattn.speculative.model import ShardedModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from specattn.speculative.model import TargetModel

T = TypeVar("T")


def ranks_of(target: TargetModel) -> ProcessGroup | None:
    """Return the processes that decode the same requests with one target."""
    return target.process_group if isinstance(target, ShardedModel) else None


def agree(ranks: ProcessGroup | None, what: str, value: object) -> None:
    """Compare a value on all ranks, by what it prints as.

    Raises
    ------
    RankError
        If it is not the same everywhere, on every rank.
    """
    if ranks is None:
        return
    digests = [""] * ranks.size()
    digest = hashlib.sha256(repr(value).encode()).hexdigest()
    dist.all_gather_object(digests, digest, group=ranks)
    if others := [rank for rank, found in enumerate(digests) if found != digests[0]]:
        raise RankError(what, others)


def decide(ranks: ProcessGroup | None, choose: Callable[[], T]) -> T:
    """Return what rank 0 chooses, on every rank."""
    if ranks is None:
        return choose()
    chosen = [choose() if ranks.rank() == 0 else None]
    dist.broadcast_object_list(chosen, group=ranks, group_src=0)
    (found,) = chosen
    return found  # type: ignore[return-value]  # rank 0 has filled it
