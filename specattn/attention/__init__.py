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

__all__ = [
    "FLOAT8",
    "Attention",
    "AttnConfig",
    "BoundLayers",
    "BoundMultiStep",
    "KVScales",
    "Layer",
    "LayeredBackend",
    "MultiStepDraftBackend",
    "Phase",
    "RowLayout",
    "WindowPool",
    "fill_all",
]
