"""Launch options: programmatic dependent launch on Hopper, and sizes of grids.

A kernel of a programmatic dependent launch (PDL) starts while the kernel before it still runs. It
lets the next one start at once (`enter`), then waits: all that was launched before is then
complete, because whatever ran before has waited too, or was no such launch. Until it waits it
writes nothing, and reads nothing but what no kernel writes, such as weights;
`attention.gluon_tree` tells what may be read besides. Where every kernel between two products does
so, the second product prefetches its first weights meanwhile.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# programs that keep the largest GPUs busy; more than are needed cost time to start
PROGRAMS = 2048


@cache
def supports_pdl(device: torch.device) -> bool:
    """Whether ``device`` knows programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def launch_options(device: torch.device) -> dict[str, Any]:
    """Return what a kernel needs that passes its constant ``PDL`` to `enter`."""
    return {"PDL": True, "launch_pdl": True} if supports_pdl(device) else {"PDL": False}


@triton.jit
def enter(PDL: tl.constexpr):
    """If ``PDL``, let the next kernel start; wait for all earlier ones."""
    if PDL:
        # the next kernel waits for this kernel's end before it touches what it writes
        gdc_launch_dependents()
        gdc_wait()


def programs_per_row(rows: int, blocks: int) -> int:
    """Choose how many programs share a row of at most ``blocks`` blocks.

    Lengths are known on the device alone, and most rows are far shorter than they may be: a program
    per block would start many for nothing. Each takes every n-th block instead.
    """
    return max(1, min(blocks, PROGRAMS // max(rows, 1)))
