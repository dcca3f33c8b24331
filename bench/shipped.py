"""The pair that comes with the package, as the command line runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specattn.models import HFTarget, fuse, load_dflash, load_draft
from specattn.models.hub import PAIR, PAIR_HEADS

if TYPE_CHECKING:
    from pathlib import Path

    import torch


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
    draft: Any = None
    if kind != "none":
        load: Any = load_dflash if kind == "dflash" else load_draft
        draft = load(head or PAIR_HEADS[kind], target, dtype=dtype, device=device)
        target = target.with_features(draft.features)
    return fuse(target, draft) if fused else (target, draft)


def plain_target(device: torch.device | str, dtype: torch.dtype) -> Any:
    """Load the target as transformers does."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(PAIR / "target"), dtype=dtype).to(device)
