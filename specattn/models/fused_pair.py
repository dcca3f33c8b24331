"""Fused models in place of loaded ones, where they compute the same."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from specattn.errors import ModelError
from specattn.models.eagle import Eagle3Head
from specattn.models.fused import FusedTarget
from specattn.models.fused_eagle import FusedEagle3

if TYPE_CHECKING:
    from specattn.models.eagle import EagleHead
    from specattn.models.hf import HFTarget


def fuse(
    target: HFTarget, draft: EagleHead | Eagle3Head | None = None
) -> tuple[HFTarget | FusedTarget, EagleHead | Eagle3Head | FusedEagle3 | None]:
    """Return a target and its draft, each of few launches if the fused path computes it.

    What it does not compute (see `FusedTarget.from_target` and `FusedEagle3.from_head`, which say
    why) is returned as it is. Weights are shared with what was given, and nothing is held twice.

    Parameters
    ----------
    target : HFTarget
        What it returns as hidden states (``with_features``) stays.
    draft : EagleHead or Eagle3Head, optional
        From `load_draft` for this target.
    """
    fused: HFTarget | FusedTarget = target
    head: EagleHead | Eagle3Head | FusedEagle3 | None = draft
    with suppress(ModelError):
        fused = FusedTarget.from_target(target)
    if isinstance(draft, Eagle3Head):
        with suppress(ModelError):
            head = FusedEagle3.from_head(draft, target.max_context_len)
    return fused, head
