"""A step's output arrives in its entry of the host's buffer, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from specattn.kernels.step import write_output
from tests.kernels.tree_oracle import DEVICE, POISON


def made(batch: int, width: int, slots: int, *, rows: int, gap: int = 0):
    packed = torch.full((batch, width + gap), POISON, device=DEVICE)
    packed[:, :width] = torch.randint(-(2**62), 2**62, (batch, width), device=DEVICE)
    buffer = torch.full((slots, rows, width), POISON, pin_memory=DEVICE == "cuda")
    return packed[:, :width], buffer, torch.zeros(1, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize(
    ("batch", "width", "rows", "gap"),
    [
        (1, 2, 1, 0),
        (3, 7, 5, 0),
        (64, 18, 64, 3),
        (1100, 3, 1101, 1),
    ],
)
def test_outputs_arrive_in_turn(implementation, batch, width, rows, gap):
    packed, buffer, entry = made(batch, width, 3, rows=rows, gap=gap)
    expected = buffer.clone()
    for step in range(7):
        packed.add_(step)
        write_output(packed, buffer, entry)
        at = step % 3
        expected[at, :batch] = packed.cpu()
        assert int(entry) == (at + 1) % 3
        assert torch.equal(buffer, expected), step


@pytest.mark.parametrize("shape", [(2, 2, 5), (2, 3, 4)], ids=["rows", "width"])
def test_a_buffer_of_another_size_is_refused(implementation, shape):
    packed, _, entry = made(3, 5, 2, rows=3)
    buffer = torch.full(shape, POISON)
    with pytest.raises(ValueError, match="buffer must be"):
        write_output(packed, buffer, entry)
    assert (buffer == POISON).all()
    assert int(entry) == 0


@pytest.mark.gpu
def test_recorded_outputs_go_to_pinned_memory_in_turn():
    """The host reads them once an event after the replay has come; no copy is recorded."""
    packed, buffer, entry = made(5, 4, 2, rows=8)
    write_output(packed, buffer, entry)
    torch.cuda.synchronize()
    entry.zero_()
    graph, source = torch.cuda.CUDAGraph(), packed.clone()
    with torch.cuda.graph(graph):
        packed.copy_(source)
        write_output(packed, buffer, entry)
        source.add_(1)
    want, done = source.cpu(), torch.cuda.Event()
    for step in range(50):
        buffer[step % 2].fill_(POISON)
        torch.cuda._sleep(100_000)
        graph.replay()
        done.record()
        done.synchronize()
        assert torch.equal(buffer[step % 2, :5], want + step)
        assert (buffer[step % 2, 5:] == POISON).all()
