"""Fused models compute what loaded ones compute, in few kernel launches."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from specattn.errors import ModelError
from specattn.models.eagle import Eagle3Head
from specattn.models.fused.dflash import FusedDFlash
from specattn.models.fused.draft import FusedEagle3
from specattn.models.fused.target import FusedTarget

if TYPE_CHECKING:
    from specattn.models.eagle import EagleHead
    from specattn.models.hf import HFTarget

__all__ = ["FusedDFlash", "FusedEagle3", "FusedTarget", "fuse"]


def fuse(
    target: HFTarget, draft: EagleHead | Eagle3Head | None = None
) -> tuple[HFTarget | FusedTarget, EagleHead | Eagle3Head | FusedEagle3 | None]:
    """Fuse the target and the draft that the fused path computes.

    A model that it does not compute is returned as it is; `FusedTarget.from_target` and
    `FusedEagle3.from_head` say why. A fused model shares the weights of the one it was made of.

    Parameters
    ----------
    target : HFTarget
        The target; the features that it gives stay the same.
    draft : EagleHead or Eagle3Head, optional
        A head of `load_draft` for this target.
    """
    fused: HFTarget | FusedTarget = target
    head: EagleHead | Eagle3Head | FusedEagle3 | None = draft
    with suppress(ModelError):
        fused = FusedTarget.from_target(target)
    if isinstance(draft, Eagle3Head):
        with suppress(ModelError):
            head = FusedEagle3.from_head(draft, target.max_context_len)
    return fused, head
