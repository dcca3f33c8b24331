"""Copy an engine's tensors into plans; read and write masks."""

from __future__ import annotations

from specattn.kernels.masks.copy_in import copy_in_prompts, copy_in_rows, copy_in_steps
from specattn.kernels.masks.inputs import PlanInputs, Window
from specattn.kernels.masks.layouts import KINDS, pack_masks

__all__ = [
    "KINDS",
    "PlanInputs",
    "Window",
    "copy_in_prompts",
    "copy_in_rows",
    "copy_in_steps",
    "pack_masks",
]
