"""This library's `Engine`, with as much of every tree kept as SGLang is told to keep."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from bench.engines.cells import BLOCK, BLOCK_SIZE, LONGEST, MODEL, SETTINGS, WARM, states_read
from bench.engines.sglang_side import LAYERS, SHORT_LAYERS, random_prompts
from bench.random_models import random_eagle3, random_target
from bench.step_blocks import draft_config, random_head
from bench.step_forced import Forced
from bench.step_world import SHARPER, shapes
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request

if TYPE_CHECKING:
    from bench.engines.cells import Job
    from bench.engines.child import Turn
    from bench.step_world import Shape

# slots after a request's last token that a step may write
ROOM = 128


def make(job: Job, shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Engine, Forced]:
    """Make an engine of random weights, and what forces its steps' lengths."""
    steps, topk, nodes, gained = SETTINGS[job.setting]
    batches = sorted({batch for batch, _ in job.places})
    longest = max(context for _, context in job.places) + (job.steps + WARM) * gained + ROOM
    target = random_target(
        shape.target, dtype=dtype, device=device, quantization=job.weights or None
    )
    draft: Any
    if job.setting == BLOCK:
        # SGLang's topk is how many tokens of a place a tree chooses from
        config = SpecConfig(steps, 1, nodes, longest, batches[-1], tree="best_first", ranks=topk)
        draft, lowest = random_head(
            target, draft_config(shape.draft), BLOCK_SIZE, states_read(shape)
        )
    else:
        config = SpecConfig(steps, topk, nodes, longest, batches[-1])
        draft, lowest = random_eagle3(shape.draft, target, shape.draft_vocab), shape.draft_vocab
        # a trained draft's distribution is as peaked
        draft.lm_head.weight.mul_(SHARPER)
    forced = Forced(torch.full((batches[-1],), gained, dtype=torch.int32, device=device), lowest)
    engine = Engine(
        target.with_features(draft.features),
        draft,
        config,
        num_slots=job.room(gained) + batches[-1] * ROOM + 1,
        buckets=batches,
        graphs=device.type == "cuda",
        accept=forced,
    )
    return engine, forced


def measure(engine: Engine, prompts: list[list[int]], steps: int, gained: int) -> dict[str, Any]:
    """Time steps of a whole batch, a step ahead as `Engine.generate` runs them."""
    new, batch = (steps + WARM) * gained + 1, len(prompts)
    begin = time.perf_counter()
    results = engine.add([Request(prompt, new, ignore_eos=True) for prompt in prompts])
    times = [time.perf_counter()]
    while engine.num_running == batch:
        engine.step(ahead=True)
        times.append(time.perf_counter())
    engine.clear()
    lengths = [length for result in results for length in result.accept_lens]
    pairs = zip(times[WARM:-2], times[WARM + 1 : -1], strict=True)
    spans = [1e3 * (after - before) for before, after in pairs]
    # shallower trees than forced gain less
    mean, middle = statistics.fmean(lengths), statistics.median(spans)
    return {
        "seconds": round(times[-1] - begin, 2),
        "gained": round(mean, 3),
        "ms": round(middle, 4),
        "least_ms": round(min(spans), 4),
        "most_ms": round(max(spans), 4),
        "tokens_per_s": round(1e3 * batch * mean / middle, 1),
        "intervals": len(spans),
    }


def run(turn: Turn) -> None:
    """Run the job of a process."""
    layers = LAYERS if turn.job.kind == "bench" else SHORT_LAYERS
    shape = shapes(LONGEST, layers)[MODEL]
    engine, _ = make(turn.job, shape, torch.device("cuda"), torch.bfloat16)
    turn.wait()
    gained = SETTINGS[turn.job.setting][3]
    for batch, context in turn.places():
        found = measure(engine, random_prompts(batch, context), turn.job.steps, gained)
        turn.record(batch=batch, context=context, **found)
