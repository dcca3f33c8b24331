"""Fused models compute what loaded ones compute, in few kernel launches."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from specattn.errors import ModelError
from specattn.models.dflash import DFlashHead
from specattn.models.eagle import Eagle3Head
from specattn.models.fused.dflash import FusedDFlash
from specattn.models.fused.draft import FusedEagle3
from specattn.models.fused.target import FusedTarget
from specattn.models.hf import HFTarget
from specattn.speculative.standalone import LMDraft

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specattn.models.eagle import EagleHead

    Draft = EagleHead | Eagle3Head | DFlashHead | LMDraft

log = logging.getLogger(__name__)

__all__ = ["FusedDFlash", "FusedEagle3", "FusedTarget", "fuse"]


def fuse(
    target: HFTarget, draft: Draft | None = None
) -> tuple[HFTarget | FusedTarget, Draft | FusedEagle3 | FusedDFlash | None]:
    """Fuse the target and the draft that the fused path computes.

    A model that it does not compute is returned as it is, and the log says why at level INFO;
    `FusedTarget.from_target`, `FusedEagle3.from_head` and `FusedDFlash.from_head` raise the same
    reasons. A fused model shares the weights of the one it was made of.

    Parameters
    ----------
    target : HFTarget
        The target; the features that it gives stay the same.
    draft : EagleHead, Eagle3Head, DFlashHead or LMDraft, optional
        A draft for this target, as it was loaded.
    """
    fused: HFTarget | FusedTarget = target
    head: Draft | FusedEagle3 | FusedDFlash | None = draft
    with _logging_why():
        fused = FusedTarget.from_target(target)
    if isinstance(draft, Eagle3Head):
        with _logging_why():
            head = FusedEagle3.from_head(draft, target.max_context_len)
    elif isinstance(draft, DFlashHead):
        with _logging_why():
            head = FusedDFlash.from_head(draft, target.max_context_len)
    elif isinstance(draft, LMDraft) and isinstance(draft.model, HFTarget):
        with _logging_why():
            head = replace(draft, model=FusedTarget.from_target(draft.model))
    elif draft is not None:
        log.info("the draft is not fused: a %s has no fused form", type(draft).__name__)
    return fused, head


@contextmanager
def _logging_why() -> Iterator[None]:
    """Log why a model is not fused."""
    try:
        yield
    except ModelError as error:
        log.info("the %s is not fused: %s", error.argument, error)
