"""Load target models and draft heads.

The package imports transformers, so ``import specattn`` does not import it.
"""

from specattn.models.dflash import DFlashHead
from specattn.models.draft import load_dflash, load_draft, load_lm_draft
from specattn.models.eagle import Eagle3Head, EagleHead
from specattn.models.fused.target import FusedTarget, fuse
from specattn.models.hf import HFTarget
from specattn.models.mtp import MtpHead
from specattn.models.quantisation import quantise_model
from specattn.speculative.proposers.standalone import LMDraft

__all__ = [
    "DFlashHead",
    "Eagle3Head",
    "EagleHead",
    "FusedTarget",
    "HFTarget",
    "LMDraft",
    "MtpHead",
    "fuse",
    "load_dflash",
    "load_draft",
    "load_lm_draft",
    "quantise_model",
]
