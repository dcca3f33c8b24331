"""Programmatic dependent launch on Hopper: kernels that start while the one before still runs.

A kernel of such a launch lets the next one start at once (`enter`), and waits: all that was
launched before is then complete, for whatever ran before has waited, too, or was no such launch.
Until it waits it writes nothing, and reads nothing but what no kernel writes, as weights; what may
be read besides, `gluon_tree` tells. Where every kernel between two products does so, the second
product brings its first weights meanwhile.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def starts_early(device: torch.device) -> bool:
    """Whether ``device`` knows programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(device: torch.device) -> dict[str, Any]:
    """Return the options of a launch whose kernel calls `enter` with its constant ``PDL``."""
    return {"PDL": True, "launch_pdl": True} if starts_early(device) else {"PDL": False}


@triton.jit
def enter(PDL: tl.constexpr):
    """Let the next kernel start, and wait for all before this one; without ``PDL``, nothing."""
    if PDL:
        # whoever comes next waits for this kernel's end before it touches what it writes
        gdc_launch_dependents()
        gdc_wait()
