"""Hold an operation to torch; time many calls of it in one CUDA graph."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from bench.small_ops_step import by_torch, by_triton
from bench.suite import timing

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.small_ops_step import Op

MOST_CALLS, REPLAY_US = 64, 4e3


def check(op: Op) -> None:
    """Hold the kernel to torch, bit by bit.

    Raises
    ------
    ArithmeticError
        If more than the allowed share differs.
    """
    kernels = importlib.import_module(f"specattn.kernels.{op.module}")
    before = [tensor.clone() for tensor in op.outputs]
    with by_triton():
        op.run(kernels, 0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # what lies on the host is written later
    found = [tensor.clone() for tensor in op.outputs]
    for tensor, value in zip(op.outputs, before, strict=True):
        tensor.copy_(value)
    with by_torch():
        op.run(kernels, 0)
    for tensor, value in zip(op.outputs, found, strict=True):
        share = (tensor != value).float().mean().item()
        if share > op.differ:
            raise ArithmeticError(f"{op.name}: {share:.1%} of {list(tensor.shape)} differ")


def launches(call: Callable[[], None]) -> int:
    """Kernels, copies and fills of one call."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == cuda for event in profile.events())


def measure(
    name: str, moved: int, call: Callable[[int], None], sets: int, rounds: int, count: bool
) -> dict[str, Any]:
    """Time a stack of calls; with ``count``, count the launches of one, too."""
    single = timing.once(lambda: call(0))
    calls = max(8, min(MOST_CALLS, round(REPLAY_US / single)))

    def stack() -> None:
        for nth in range(calls):
            call(nth % sets)

    recorded = timing.record(stack, calls)
    timing.replay_in_turn([recorded], rounds, 1e9)
    return {
        "name": name,
        "us": round(recorded.median, 3),
        "p10_us": round(recorded.percentile(0.1), 3),
        "p90_us": round(recorded.percentile(0.9), 3),
        "rounds": len(recorded.times),
        "calls": calls,
        "bytes": moved,
        "launches": launches(lambda: call(0)) if count else None,
    }
