"""Memset nodes of recorded graphs, turned into kernels.

Libraries clear counters with `cudaMemsetAsync`, as cuBLAS does for many products of 256 rows and
more. Recorded, that is a memset node, and a graph that has some takes several times as long to
launch (docs/notes/launches.md). The driver lets a graph be edited until it
is instantiated (https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__GRAPH.html): a kernel
that writes the same bytes takes the place of each.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p

import torch

from specattn.cuda_graph import driver
from specattn.cuda_graph.streams import own_stream

# CUgraphNodeType of cuda.h
_KERNEL, _MEMSET = 0, 2


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS: ``height`` rows of ``width`` elements, ``pitch`` bytes apart."""

    _fields_ = (
        ("address", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element_size", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("params", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


class _Edge(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", c_ubyte),
        ("to_port", c_ubyte),
        ("type", c_ubyte),
        ("zero", c_ubyte * 5),
    )


def replace_memsets(graph: torch.cuda.CUDAGraph) -> int:
    """Replace memset nodes of a recorded graph by kernels.

    Parameters
    ----------
    graph : torch.cuda.CUDAGraph
        Made with ``keep_graph=True``, recorded, and not instantiated yet.

    Returns
    -------
    int
        How many nodes were replaced. Memsets of several rows (`cudaMemset2DAsync`) are left, and
        so is everything where the driver is older than CUDA 12.3.

    Raises
    ------
    RuntimeError
        If the driver refuses a call, or the graph keeps no nodes.
    """
    raw, made, replaced = graph.raw_cuda_graph(), {}, 0
    if not driver.has("cuGraphAddDependencies_v2"):
        return replaced
    for node in _nodes(raw, _MEMSET):
        found = _Memset()
        driver.call("cuGraphMemsetNodeGetParams", node, byref(found))
        if found.height != 1:
            continue
        key = found.address, found.value, found.element_size, found.width
        if key not in made:
            made[key] = _setting(*key)
        _replace(raw, node, made[key])
        replaced += 1
    return replaced


def _replace(graph: int, node: int, like: torch.cuda.CUDAGraph) -> None:
    """Put the only kernel of another graph where a node is."""
    (source,) = _nodes(like.raw_cuda_graph(), _KERNEL)
    params, kernel = _Kernel(), c_uint64()
    driver.call("cuGraphKernelNodeGetParams_v2", source, byref(params))
    driver.call("cuGraphAddKernelNode_v2", byref(kernel), graph, None, 0, byref(params))
    driver.call("cuGraphKernelNodeCopyAttributes", kernel.value, source)
    for other, edge in _neighbours("cuGraphNodeGetDependencies_v2", node):
        _join(graph, other, kernel.value, edge)
    for other, edge in _neighbours("cuGraphNodeGetDependentNodes_v2", node):
        _join(graph, kernel.value, other, edge)
    driver.call("cuGraphDestroyNode", node)


def _setting(address: int, value: int, size: int, width: int) -> torch.cuda.CUDAGraph:
    """Record a kernel that sets ``width`` elements of ``size`` bytes."""
    memory = torch.as_tensor(_Memory(address, size, width), device="cuda")
    # the same bits as a signed number of this size
    number = int.from_bytes((value % 256**size).to_bytes(size, "little"), "little", signed=True)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(own_stream("begin", memory.device.index)):
        graph.capture_begin()
        try:
            memory.fill_(number)
        finally:
            graph.capture_end()
    return graph


class _Memory:
    """Device memory as torch takes it: no tensor, nobody's."""

    def __init__(self, address: int, size: int, width: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (width,),
            "typestr": f"<i{size}",
            "data": (address, False),
            "version": 3,
        }


def _nodes(graph: int, kind: int) -> list[int]:
    """Return the nodes of a kind."""
    count = c_size_t()
    driver.call("cuGraphGetNodes", graph, None, byref(count))
    nodes = (c_uint64 * count.value)()
    driver.call("cuGraphGetNodes", graph, nodes, byref(count))
    return [node for node in nodes if _kind(node) == kind]


def _kind(node: int) -> int:
    kind = c_uint()
    driver.call("cuGraphNodeGetType", node, byref(kind))
    return kind.value


def _neighbours(name: str, node: int) -> list[tuple[int, _Edge]]:
    """Return the nodes before or after a node, and by what edges."""
    count = c_size_t()
    driver.call(name, node, None, None, byref(count))
    if not count.value:
        return []
    nodes, edges = (c_uint64 * count.value)(), (_Edge * count.value)()
    driver.call(name, node, nodes, edges, byref(count))
    return list(zip(nodes, edges, strict=True))


def _join(graph: int, before: int, after: int, edge: _Edge) -> None:
    ends = byref(c_uint64(before)), byref(c_uint64(after))
    driver.call("cuGraphAddDependencies_v2", graph, *ends, byref(edge), 1)
