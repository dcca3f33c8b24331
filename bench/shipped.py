"""Targets with a head that fits, and the pair that comes with the package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specattn.models import HFTarget, fuse, load_dflash, load_draft, load_lm_draft
from specattn.models.hub import PAIR, PAIR_HEADS

if TYPE_CHECKING:
    from pathlib import Path

    import torch

#: What loads a head, by its kind.
LOADERS: dict[str, Any] = {"eagle3": load_draft, "dflash": load_dflash, "model": load_lm_draft}


def fitted(
    target: HFTarget, kind: str, head: Path | str | None = None, *, fused: bool = True
) -> tuple[Any, Any]:
    """Return a loaded target, which gives what the head reads, and the head, by its kind, or None.

    Both are fused where there is a fused form, over the same weights.
    """
    draft = None
    if kind != "none":
        draft = LOADERS[kind](head, target)
        if kind != "model":
            target = target.with_features(draft.features)
    return fuse(target, draft) if fused else (target, draft)


def pair(
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    *,
    fused: bool = True,
    kind: str = "eagle3",
    head: Path | None = None,
) -> tuple[Any, Any]:
    """Load target and draft, fused or with transformers' modules; in their own dtype by default.

    ``kind`` is that of the draft head, or none; ``head`` is a folder to take it from instead of the
    package's.
    """
    target = HFTarget.from_pretrained(str(PAIR / "target"), dtype=dtype, device=device)
    return fitted(target, kind, head or PAIR_HEADS.get(kind), fused=fused)
