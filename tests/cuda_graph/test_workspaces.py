"""Graphs keep the workspaces their products use, and leave none behind."""

from __future__ import annotations

import gc
import subprocess
import sys
from functools import partial

import pytest
import torch

from specattn.cuda_graph.recorder import Recorder, side_by_side
from specattn.cuda_graph.streams import own_stream

pytestmark = pytest.mark.gpu

# products whose sums are split, which need a workspace; an illegal access ends their process
PROGRAM = """
import gc, torch
from specattn.cuda_graph.recorder import Recorder, side_by_side

torch.manual_seed(0)
draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
shapes = (16, 65536, 256), (1, 32768, 64), (200, 16384, 128)
pairs = [(draw(m, k), draw(k, n)) for m, k, n in shapes]
wanted = [x.double() @ weight.double() for x, weight in pairs]

def products(outs):
    for out, (x, weight) in zip(outs, pairs):
        torch.mm(x, weight, out=out)

def recorded(parts):
    outs = [[torch.empty(len(x), w.shape[1], dtype=x.dtype, device="cuda") for x, w in pairs]
            for _ in range(parts)]
    calls = [lambda one=one: products(one) for one in outs]
    device = torch.device("cuda", torch.cuda.current_device())
    run = (lambda: side_by_side(device, *calls)) if parts > 1 else calls[0]
    # as an engine does, which keeps its recorder
    recorder = Recorder()
    return recorder, recorder.record(run), outs

for parts in (1, 2):
    made = [recorded(parts) for _ in range(4)]
    while made:
        # every order of going: the last, then the first, and so on
        made.pop(0 if len(made) % 2 else -1)
        gc.collect()
        torch.cuda.empty_cache()
        for _, recording, outs in made:
            for one in outs:
                for out in one:
                    out.fill_(float("nan"))
            for _ in range(20):
                recording.graph.replay()
            for one in outs:
                for out, want in zip(one, wanted):
                    error = (out.double() - want).norm() / want.norm()
                    assert error < 5e-3, error
print("whole")
"""


def test_graphs_outlive_others_that_multiply():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-2000:]


# what `torch.compile` does before and after it records a graph
CLEARED = """
import torch
from specattn.cuda_graph.recorder import Recorder, side_by_side

torch.manual_seed(0)
draw = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
x, weight, bias = draw(16, 65536), draw(65536, 256), draw(256)
outs = [torch.empty(16, 256, dtype=x.dtype, device="cuda") for _ in range(4)]

def half(at):
    torch.mm(x, weight, out=outs[at])
    torch.addmm(bias, x, weight, out=outs[at + 1])

def step():
    side_by_side(x.device, lambda: half(0), lambda: half(2))

wanted = x.double() @ weight.double()
recorder, recordings = Recorder(), []
for _ in range(2):
    recordings.append(recorder.record(step))
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    # whoever allocates next is given what was freed
    others = [torch.zeros(32 << 20, dtype=torch.uint8, device="cuda") for _ in range(8)]
    others += [torch.zeros(8 << 20, dtype=torch.uint8, device="cuda") for _ in range(8)]
    for recording in recordings:
        for out in outs:
            out.fill_(float("nan"))
        recording.graph.replay()
        for at, out in enumerate(outs):
            want = wanted + bias.double() * (at % 2)
            error = (out.double() - want).norm() / want.norm()
            assert error < 5e-3, error
    assert not any(other.any() for other in others)
print("whole")
"""


def test_others_may_clear_workspaces():
    done = subprocess.run([sys.executable, "-c", CLEARED], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-2000:]


def test_recorders_that_are_gone_leave_no_memory():
    """More of them than torch has streams to hand out."""
    x = torch.randn(16, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16)
    reserved = []
    for _ in range(40):
        Recorder().record(lambda: x @ weight)
        gc.collect()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert set(reserved[1:]) == {reserved[1]}


def test_no_product_runs_where_graphs_begin():
    streams, numbers = [], torch.zeros(2, device="cuda")

    def step() -> None:
        device = torch.device("cuda", torch.cuda.current_device())

        def here(at: int) -> None:
            streams.append(torch.cuda.current_stream())
            numbers[at].add_(1)

        side_by_side(device, partial(here, 0), partial(here, 1))

    Recorder().record(step)
    device = torch.cuda.current_device()
    work, side, begin = (own_stream(use, device) for use in ("work", "side", "begin"))
    assert streams == [side, work] * 3
    assert begin not in (work, side)
    assert len({stream.cuda_stream for stream in (begin, work, side)}) == 3
