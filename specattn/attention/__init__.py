"""Attention alone, for engines with caches and tables of their own.

An engine makes one `Attention` over its request table and a `Layer` per layer of its model. Before
a forward it copies in what it knows (`BoundLayers.copy_in`): one launch, and one for the plans of
all layers. In every layer it then attends. Nothing waits for the device, and what has been made
before a capture can be recorded in it. A model of this library has its layers in a
`LayeredBackend`, which binds them alike.
"""

from specattn.attention.attention import Attention
from specattn.attention.bound import BoundLayers
from specattn.attention.layers import Layer, LayeredBackend
from specattn.attention.multi_step import BoundMultiStep, MultiStepDraftBackend
from specattn.attention.window import WindowPool
from specattn.backends.base import fill_all
from specattn.batch import Phase, RowLayout
from specattn.config import FLOAT8, AttnConfig, KVScales
from specattn.kernels.cache import store_kv
from specattn.kernels.tree import grow_words
from specattn.masks import words_from_mask
from specattn.plan import (
    AttnInputs,
    AttnPlan,
    ExtendPlan,
    MultiStepDims,
    MultiStepInputs,
    MultiStepPlan,
    causal_words,
)

__all__ = [
    "FLOAT8",
    "Attention",
    "AttnConfig",
    "AttnInputs",
    "AttnPlan",
    "BoundLayers",
    "BoundMultiStep",
    "ExtendPlan",
    "KVScales",
    "Layer",
    "LayeredBackend",
    "MultiStepDims",
    "MultiStepDraftBackend",
    "MultiStepInputs",
    "MultiStepPlan",
    "Phase",
    "RowLayout",
    "WindowPool",
    "causal_words",
    "fill_all",
    "grow_words",
    "store_kv",
    "words_from_mask",
]
