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

# a product whose sums are split, which needs a workspace; an illegal access ends its process
PROGRAM = """
import gc, torch
from specattn.cuda_graph.recorder import Recorder, side_by_side

torch.manual_seed(0)
x = torch.randn(16, 65536, device="cuda", dtype=torch.bfloat16)
weight = torch.randn(65536, 256, device="cuda", dtype=torch.bfloat16)
wanted = x.double() @ weight.double()

def recorded(parts):
    outs = [torch.empty(16, 256, device="cuda", dtype=torch.bfloat16) for _ in range(parts)]
    calls = [lambda out=out: torch.mm(x, weight, out=out) for out in outs]
    run = (lambda: side_by_side(x.device, *calls)) if parts > 1 else calls[0]
    # as an engine does, which keeps its recorder
    recorder = Recorder()
    return recorder, recorder.record(run), outs

for parts in (1, 2):
    made = [recorded(parts) for _ in range(4)]
    while made:
        # every order of going: the first, then the last, and so on
        made.pop(0 if len(made) % 2 else -1)
        gc.collect()
        torch.cuda.empty_cache()
        for _, recording, outs in made:
            for out in outs:
                out.fill_(float("nan"))
            for _ in range(20):
                recording.graph.replay()
            for out in outs:
                error = (out.double() - wanted).norm() / wanted.norm()
                assert error < 5e-3, error
print("whole")
"""


def test_graphs_outlive_others_that_multiply():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
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
