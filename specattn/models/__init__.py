"""Load target models and draft heads.

The package imports transformers, so ``import specattn`` does not import it.
"""

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
