"""Counts of what SGLang's scheduler launches around a step, for tests on a CPU."""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.run_batch"
BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
# operations without a kernel
VIEWS = ("view", "slice", "select", "alias", "detach", "unsqueeze", "squeeze", "expand", "unfold")
COUNTS: Counter[str] = Counter()


class Operations(TorchDispatchMode):
    """Counts operations that would be launches, by who asks for them."""

    #: Who asks; None does not count.
    asking: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0].strip("_")
        if Operations.asking and name not in VIEWS and "empty" not in name:
            COUNTS[Operations.asking] += 1
        return func(*args, **(kwargs or {}))


def asked_by(name: str | None, call: Callable[..., Any]) -> Callable[..., Any]:
    """Have what ``call`` launches counted under a name."""

    def counted(*args: Any, **options: Any) -> Any:
        before, Operations.asking = Operations.asking, name
        try:
            return call(*args, **options)
        finally:
            Operations.asking = before

    return counted


def watch(path: str) -> None:
    """Count steps of the scheduler of this process; write the counts to a file."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from specattn import StepDecoder

    # what a step runs would be one graph
    for name in ("step_async", "capture"):
        setattr(StepDecoder, name, asked_by(None, getattr(StepDecoder, name)))

    def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any) -> Any:
        if not batch.forward_mode.is_decode():
            return original(scheduler, batch, *args)
        worker, replays = scheduler.model_worker, _replays(scheduler)
        worker.steps.launch = asked_by("worker", type(worker.steps).launch.__get__(worker.steps))
        with Operations():
            out = asked_by("scheduler", original)(scheduler, batch, *args)
        COUNTS["steps"] += 1
        COUNTS["fused models"] = _fused(worker.steps.decoders[0])
        COUNTS.update(_replays(scheduler) - replays)
        _write(path)
        return out

    def retract(original: Callable[..., Any], batch: Any, *args: Any, **options: Any) -> Any:
        COUNTS["retracted"] += 1
        return original(batch, *args, **options)

    HookRegistry.register(SCHEDULER, run_batch, HookType.AROUND)
    HookRegistry.register(f"{BATCH}.retract_decode", retract, HookType.AROUND)


def _replays(scheduler: Any) -> Counter[str]:
    """Return how often whole steps were replayed, and parts of constrained ones."""
    found: Counter[str] = Counter()
    for decoder in scheduler.model_worker.steps.decoders:
        for part, count in decoder.runner.stats.replays.items():
            found["replays" if part.mode is None else "parts"] += count
            found[f"steps of {decoder.config.num_draft_tokens} nodes"] += count
    return found


def _fused(decoder: Any) -> int:
    from specattn.integrations.sglang.modules import SGLangModel

    models = decoder.target.model, decoder.draft.model
    return sum(not isinstance(model, SGLangModel) for model in models)


def _write(path: str) -> None:
    if torch.distributed.get_rank() == 0:
        with open(path + ".new", "w") as file:
            json.dump(COUNTS, file)
        os.replace(path + ".new", path)
