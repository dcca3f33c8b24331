"""Target models and draft heads; imports transformers, so ``import specattn`` leaves it alone."""

from specattn.models.hf import FeatureSpec, HFTarget

__all__ = ["FeatureSpec", "HFTarget"]
