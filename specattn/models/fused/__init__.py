"""Fused models compute what loaded ones compute, in few kernel launches."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TypeVar

from specattn.errors import ModelError
from specattn.models.fused.target import FusedTarget
from specattn.models.hf import HFTarget
from specattn.speculative.standalone import LMDraft

log = logging.getLogger(__name__)

__all__ = ["FusedTarget", "fuse"]

Draft = TypeVar("Draft")


def fuse(
    target: HFTarget, draft: Draft | None = None
) -> tuple[HFTarget | FusedTarget, Draft | None]:
    """Fuse the target and the draft, where there is a fused form.

    A model that it does not compute is returned as it is, and the log says why at level INFO;
    `FusedTarget.from_target` raises the same reasons. A fused model shares the weights of the one
    it was made of. Heads are made fused when they are loaded.

    Parameters
    ----------
    target : HFTarget
        The target; the features that it gives stay the same.
    draft : head or LMDraft, optional
        A draft for this target, as it was loaded.
    """
    if isinstance(draft, LMDraft) and isinstance(draft.model, HFTarget):
        draft = replace(draft, model=_fused("draft", draft.model))
    return _fused("target", target), draft


def _fused(name: str, model: HFTarget) -> HFTarget | FusedTarget:
    """Return a model's fused form, or the model itself and log why."""
    try:
        return FusedTarget.from_target(model)
    except ModelError as error:
        log.info("the %s is not fused: %s", name, error)
        return model
