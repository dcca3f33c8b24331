"""What fails while a graph is captured is named, and leaves everything usable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import triton

from specattn.backends import BoundAttention, load_backend
from specattn.batch import ForwardMode
from specattn.cuda_graph import GraphRunner
from specattn.errors import CapacityError, CaptureError
from tests.recordings import forget
from tests.worlds import DEVICE, inputs, part_of, same, world

CUDA = DEVICE.type == "cuda"
MODE = ForwardMode.TARGET_VERIFY
PART = part_of(MODE)
LENS = [7, 30]


@triton.jit
def _nothing(_):
    pass


def launch(q) -> None:
    """More blocks than a grid may have in its second axis, if recording."""
    _nothing[1, 70000 if recording() else 1](q)


def wait(q) -> None:
    """Wait for the device, which ends a recording."""
    if recording():
        torch.cuda.synchronize()


def throw(q) -> None:
    if recording() or not CUDA:
        raise RuntimeError("no such luck")


def recording() -> bool:
    return CUDA and torch.cuda.is_current_stream_capturing()


class Breaking(load_backend("triton" if CUDA else "torch_native")):
    """Attends, and then does what it is told to."""

    name = "breaking"
    fault: ClassVar[Any] = None

    def bind(self, plan):
        return BoundBreaking(super().bind(plan))


@dataclass
class BoundBreaking(BoundAttention):
    inner: Any

    def schedule(self, seq_lens_cpu):
        self.inner.schedule(seq_lens_cpu)

    def fill(self):
        self.inner.fill()

    def run(self, q, *rest):
        self.inner.run(q, *rest)
        if Breaking.fault is not None:
            Breaking.fault(q)


FAULTS = {
    "launch": (launch, r"RuntimeError: Triton Error \[CUDA\]: invalid argument"),
    "wait": (wait, r"\w+Error: CUDA error: operation not permitted"),
    "throw": (throw, "RuntimeError: no such luck"),
}


@pytest.fixture(autouse=True)
def _calm():
    yield
    Breaking.fault = None


@pytest.mark.parametrize("name", FAULTS if CUDA else ["throw"])
def test_a_capture_that_fails_leaves_a_runner_usable(name):
    """Graphs recorded before, eager forwards, random numbers and later captures all work."""
    one, values = world(Breaking, [1, 4]), inputs(MODE, LENS, 0)
    runner = one.decoder.runner

    def outcome() -> dict:
        one.poison(LENS)
        return one.run(MODE, LENS, values)

    wanted = outcome()
    Breaking.fault, message = FAULTS[name]
    stream = torch.cuda.current_stream() if CUDA else None
    for _ in range(2):
        with pytest.raises(CaptureError, match=f"^capturing {MODE.value} .* 4 failed: {message}"):
            runner.capture(PART)
    Breaking.fault = None
    if CUDA:
        assert torch.cuda.current_stream() == stream
        assert torch.rand(9, device=DEVICE).isfinite().all()
    assert runner.captured(PART) == [1, 4]
    same(outcome(), wanted)
    forget(runner, PART)
    same(outcome(), wanted)
    assert runner.stats.eager[PART] == 1
    runner.capture(PART)
    assert runner.recorded(PART) == CUDA
    same(outcome(), wanted)


def test_what_served_while_buckets_were_captured_does_not_serve_after_them(monkeypatch):
    one, values = world(Breaking, [1, 4]), inputs(MODE, LENS, 0)
    runner = one.decoder.runner
    capture = runner._capture

    def meanwhile(bound, bucket):
        one.run(MODE, LENS, values)
        return capture(bound, bucket)

    forget(runner, PART)
    monkeypatch.setattr(runner, "_capture", meanwhile)
    runner.capture(PART)
    assert runner.stats.eager[PART] == 1  # while that of 4 was captured, but not while that of 1
    assert runner.stats.replays[PART] == 1
    runner.capture(PART)
    assert runner.ready((PART,), len(LENS)) == [runner._captured[PART][4]]


def test_a_capture_that_fails_does_not_undo_larger_buckets(monkeypatch):
    one, values = world(Breaking, [1, 4]), inputs(MODE, LENS, 0)
    runner = one.decoder.runner
    one.poison(LENS)
    wanted = one.run(MODE, LENS, values)
    forget(runner, PART)
    monkeypatch.setattr(
        Breaking,
        "fault",
        lambda q: throw(q) if len(q) == one.decoder.config.num_draft_tokens else None,
    )
    with pytest.raises(CaptureError, match=r"for a batch of 1 failed: RuntimeError: no such luck"):
        runner.capture(PART)
    assert runner.captured(PART) == [4]
    one.poison(LENS)
    same(one.run(MODE, LENS, values), wanted)
    assert not runner.stats.eager


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (
            torch.OutOfMemoryError("no more"),
            CapacityError,
            rf"out of device memory capturing {MODE.value} for a batch of 4; .* buckets \[\] holds "
            "them; capture smaller ones",
        ),
        (
            RuntimeError("no such luck"),
            CaptureError,
            rf"capturing {MODE.value} for a batch of 4 failed: RuntimeError: no such luck",
        ),
    ],
    ids=["memory", "launch"],
)
def test_buffers_that_cannot_be_made_are_a_capture_that_fails(error, raised, message):
    one, values = world(Breaking, [1, 4]), inputs(MODE, LENS, 0)
    make, errors = one.decoder._launch_of, [error]

    def failing(mode, size):
        if errors:
            raise errors.pop()
        return make(mode, size)

    one.poison(LENS)
    wanted = one.run(MODE, LENS, values)
    runner = vars(one.decoder)["runner"] = GraphRunner(failing, [1, 4], DEVICE)
    with pytest.raises(raised, match=message):
        runner.capture(PART)
    for captured in ([], [1, 4]):
        assert runner.captured(PART) == captured
        one.poison(LENS)
        same(one.run(MODE, LENS, values), wanted)
        runner.capture(PART)
    assert runner.stats.eager[PART] == runner.stats.replays[PART] == 1
