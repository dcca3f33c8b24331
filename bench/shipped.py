"""The pair that comes with the package, as the command line runs it."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from specattn.models import HFTarget, fuse, load_draft

if TYPE_CHECKING:
    import torch

PAIR = files("specattn") / "pair"


def pair(
    device: torch.device | str, dtype: torch.dtype | None = None, *, fused: bool = True
) -> tuple[Any, Any]:
    """Load target and draft, fused or with transformers' modules; in their own dtype by default."""
    source = HFTarget.from_pretrained(str(PAIR / "target"), dtype=dtype, device=device)
    draft = load_draft(str(PAIR / "draft"), source, dtype=dtype, device=device)
    target = source.with_features(draft.features)
    return fuse(target, draft) if fused else (target, draft)


def plain_target(device: torch.device | str, dtype: torch.dtype) -> Any:
    """Load the target as transformers does."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(PAIR / "target"), dtype=dtype).to(device)
