"""Streams of this library's own, which nothing else records on.

Torch keeps a workspace of cuBLAS for every stream that multiplied, 32 MiB on Hopper, and hands out
the same 32 streams in turn. From 2.12 to 2.14 it frees the workspace of the stream that a graph
began on when the graph goes (https://github.com/pytorch/pytorch/issues/193402), although other
graphs that were recorded there hold its address. So no product runs on the stream where graphs
begin, and the workspaces of those where products run are never freed.
"""

from __future__ import annotations

from ctypes import byref, c_uint64
from functools import cache
from typing import Literal

import torch

from specattn.cuda_graph import driver

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING of cuda.h


@cache
def own_stream(use: Literal["begin", "work", "side"], device: int) -> torch.cuda.Stream:
    """Return the one stream of a use on a device.

    Parameters
    ----------
    use : {"begin", "work", "side"}
        Where graphs begin and end, and nothing multiplies; where programs warm up and are recorded;
        where the second of two calls runs that are recorded side by side.
    device : int
        The CUDA device's index.

    Raises
    ------
    RuntimeError
        If the driver refuses to make a stream.
    """
    handle = c_uint64()
    with torch.cuda.device(device):
        # a thread that has not called CUDA's runtime has no context yet
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        driver.call("cuStreamCreate", byref(handle), _NON_BLOCKING)
    return torch.cuda.ExternalStream(handle.value, device=torch.device("cuda", device))
