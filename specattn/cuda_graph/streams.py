"""Streams of this library's own, which nothing else records on.

Torch keeps a workspace of cuBLAS for every stream that multiplied, 32 MiB on Hopper, and hands out
the same 32 streams in turn. From 2.12 to 2.14 it frees the workspace of the stream that a graph
began on when the graph goes (https://github.com/pytorch/pytorch/issues/193402), although other
graphs that were recorded there hold its address. So no product runs on the stream where graphs
begin. Others may clear all workspaces, as `torch.compile` does where it records graphs; those of
the streams where products run lie in memory that is kept all the same.
"""

from __future__ import annotations

from ctypes import byref, c_uint64
from functools import cache
from typing import Literal

import torch

from specattn.cuda_graph import driver

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING of cuda.h


def give_workspaces(device: int) -> None:
    """Let products that this thread records work in kept memory.

    It launches two small products on each of the streams where products are recorded.
    """
    for use in ("work", "side"):
        _multiply(own_stream(use, device), device)


def _multiply(stream: torch.cuda.Stream, device: int) -> None:
    """Launch products, which give a stream its workspace."""
    # cuBLASLt has a workspace of its own, and is not asked for vectors
    one, out = torch.ones(2, 16, 16, dtype=torch.bfloat16, device=stream.device)
    current = torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream), torch.cuda.use_mem_pool(_kept(device), device):
        torch.mm(one, one, out=out)
        torch.addmm(one[0], one, one, out=out)
    current.wait_stream(stream)


@cache
def _kept(device: int) -> torch.cuda.MemPool:
    """Return the memory that holds a device's workspaces alone."""
    with torch.cuda.device(device):
        return torch.cuda.MemPool()


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
