"""What recorded graphs set in memory is set by kernels instead, and comes out the same."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from specattn.cuda_graph import driver, memset_nodes
from specattn.cuda_graph.memset_nodes import replace_memsets
from specattn.cuda_graph.recorder import Recorder

pytestmark = pytest.mark.gpu
SIZE = 4096
SETTERS = {1: "cuMemsetD8Async", 2: "cuMemsetD16Async", 4: "cuMemsetD32Async"}


def set_memory(tensor, value: int, size: int, count: int) -> None:
    """Set ``count`` elements of ``size`` bytes from where a tensor begins; no kernel."""
    driver.call(SETTERS[size], tensor.data_ptr(), ctypes.c_uint(value), count, stream())


def set_rectangle(tensor, pitch: int, value: int, width: int, height: int) -> None:
    value = ctypes.c_ubyte(value)
    driver.call("cuMemsetD2D8Async", tensor.data_ptr(), pitch, value, width, height, stream())


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def record(step) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        step()
    return graph


def count_memsets(graph) -> int:
    return len(memset_nodes._nodes(graph.raw_cuda_graph(), memset_nodes._MEMSET))


def numbers(seed: int):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device="cuda", generator=generator)


@pytest.mark.parametrize(
    ("size", "value"),
    [
        (1, 0),
        (1, 0xA5),
        (2, 0),
        (2, 0x81A5),
        (4, 0),
        (4, 7),
        (4, 0x8000A5C3),
        (4, 0xFFFFFFFF),
    ],
)
@pytest.mark.parametrize("place", ["first", "between", "last"])
@pytest.mark.parametrize(("offset", "count"), [(0, 1), (4, 1), (12, 77), (16, 1000)])
def test_kernels_set_what_was_to_be_set(size, value, place, offset, count):
    data, out = numbers(0), torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    first, last = data + 1, out + data  # compiles nothing later
    del first, last

    def step() -> None:
        if place != "first":
            data.add_(1)
        set_memory(data[offset:], value, size, count)
        if place != "last":
            torch.add(data, 3, out=out)

    graph, before = record(step), data.clone()
    assert count_memsets(graph) == 1
    assert replace_memsets(graph) == 1
    assert count_memsets(graph) == 0
    torch.cuda.synchronize()
    assert torch.equal(data, before), "replacing it has run it"
    graph.instantiate()
    pattern = torch.tensor(list(value.to_bytes(size, "little")) * count, dtype=torch.uint8)
    for seed in range(1, 4):
        data.copy_(numbers(seed))
        want = numbers(seed)
        if place != "first":
            want += 1
        want[offset : offset + size * count] = pattern.cuda()
        graph.replay()
        assert torch.equal(data, want)
        if place != "last":
            assert torch.equal(out, want + 3)


def test_order_across_streams_is_kept():
    """One is set on a second stream between a fork and a join, another after it, of one address."""
    data, out = numbers(0), torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    twice, side = torch.zeros_like(out), torch.cuda.Stream()

    def step() -> None:
        current = torch.cuda.current_stream()
        data.add_(1)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            set_memory(data[:1024], 5, 1, 1024)
            torch.mul(data[:1024], 2, out=twice[:1024])
        torch.mul(data[1024:], 2, out=twice[1024:])
        current.wait_stream(side)
        torch.add(data, twice, out=out)
        set_memory(data[:1024], 5, 1, 1024)
        set_memory(data[2048:], 9, 1, 64)

    graph = record(step)
    assert replace_memsets(graph) == 3
    graph.instantiate()
    for seed in range(3):
        data.copy_(numbers(seed))
        want = numbers(seed) + 1
        want[:1024] = 5
        graph.replay()
        assert torch.equal(out, want * 3)
        want[2048:2112] = 9
        assert torch.equal(data, want)


def test_rectangles_stay():
    data = numbers(0)
    graph = record(lambda: set_rectangle(data, 64, 3, 10, 5))
    assert replace_memsets(graph) == 0
    assert count_memsets(graph) == 1
    graph.instantiate()
    want = data.clone()
    want[:320].view(5, 64)[:, :10] = 3
    graph.replay()
    assert torch.equal(data, want)


def test_a_graph_that_keeps_no_nodes_is_refused():
    data, graph = numbers(0), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data.add_(1)
    with pytest.raises(RuntimeError, match="keep_graph"):
        replace_memsets(graph)


@pytest.mark.parametrize("rows", [192, 320, 512, 4096])
def test_recorded_products_have_no_memset_nodes(rows):
    """cuBLAS clears counters for its large products; the bits are those of the eager product."""
    torch.manual_seed(rows)
    weight = torch.randn(14336, 1024, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(rows, 1024, dtype=torch.bfloat16, device="cuda")

    def products():
        return [x @ weight.T, (x @ weight.T) @ weight]

    recorder = Recorder()
    found = recorder.record(products)
    assert count_memsets(found.graph) == 0
    for _ in range(3):
        x.normal_()
        want = products()
        for out in found.outputs:
            out.fill_(torch.nan)
        found.graph.replay()
        assert all(map(torch.equal, found.outputs, want))


def test_a_recorder_outlives_its_graphs():
    """Even if what they left in its memory pool is in use, as a workspace of cuBLAS is."""
    recorder = Recorder()
    x = torch.randn(64, 64, device="cuda")
    kept = []

    def product():
        y = x @ x
        kept.append(y)
        return y

    for round_ in range(4):
        found = recorder.record(product)
        x.normal_()
        found.graph.replay()
        torch.testing.assert_close(found.outputs, x @ x)
        if round_ == 2:
            kept.clear()
        del found
        gc.collect()
        torch.cuda.empty_cache()
