"""Target models and draft heads; imports transformers, so ``import specattn`` leaves it alone."""

from specattn.models.draft import load_draft
from specattn.models.eagle import Eagle3Head, EagleHead
from specattn.models.fused import FusedEagle3, FusedTarget, fuse
from specattn.models.hf import FeatureSpec, HFTarget

__all__ = [
    "Eagle3Head",
    "EagleHead",
    "FeatureSpec",
    "FusedEagle3",
    "FusedTarget",
    "HFTarget",
    "fuse",
    "load_draft",
]
