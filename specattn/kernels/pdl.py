"""Programmatic dependent launch (PDL) on Hopper, seen from a kernel.

A kernel of such a launch starts while the kernel before it still runs. It lets the next one start
at once (`enter`), then waits: all that was launched before is then complete, because whatever ran
before has waited too, or was no such launch. Until it waits it writes nothing, and reads nothing
but what no kernel writes, such as weights; `attention.gluon_splits` tells what may be read besides.
Where every kernel between two products does so, the second product prefetches its first weights
meanwhile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def enter(PDL: tl.constexpr):
    """If ``PDL``, let the next kernel start; wait for all earlier ones."""
    if PDL:
        # the next kernel waits for this kernel's end before it touches what it writes
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def follow(PDL: tl.constexpr):
    """If ``PDL``, wait for earlier kernels, then start the next one.

    So what is launched later starts when the kernel before this one is complete, and may read what
    that one and those before it wrote.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
