"""R82: vllm#36872, vllm#55357.

With speculation, the first answer of a hybrid model was right, and each later one worse: requests
began with the states that others had left in their places, or wrote theirs to places of others.

A prompt begins with zeros, whoever had its row before and however that one ended, and a row is
written by its own request alone: by steps, chunks of prompts and padding.
"""

from __future__ import annotations

import random

import torch

from specattn import Engine, Request, SpecConfig
from specattn.models import FusedTarget, HFTarget
from tests.hybrids import Guesses, generated, hybrid

ROWS, NEW = 3, 16


def test_rows_that_were_dropped_or_ended_begin_anew() -> None:
    """Requests end, are dropped in the midst of a step ahead, and fail; all share three rows."""
    rng, model = random.Random(3), hybrid()
    prompts = [[rng.randrange(3, 101) for _ in range(rng.randrange(1, 9))] for _ in range(9)]
    texts = generated(model, prompts, NEW)
    target = FusedTarget.from_target(HFTarget.from_model(model))
    known = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    config = SpecConfig(3, 3, 9, 64, ROWS)
    run = Engine(target, Guesses(known), config, backend="torch_native", graphs=False)
    for at in range(len(prompts)):
        some = [at, (at + 3) % 9, (at + 5) % 9]
        results = run.add([Request(prompts[which], NEW) for which in some])
        for _ in range(at % 3):
            run.step(ahead=True)
        if not results[at % 3].finish_reason:
            run.drop(results[at % 3])
        # nothing of the dropped one is read: states that hold NaN would spread
        free = sorted(set(range(1, ROWS + 1)) - {one.row for one in run.running})
        for held in run.target.by_row().values():
            held[:, free] = torch.nan
        (late,) = run.add([Request(prompts[at], NEW)])
        while run.num_running:
            run.step(ahead=True)
        assert late.tokens == texts[at]
        for which, result in zip(some, results, strict=True):
            if result.finish_reason != "dropped":
                assert result.tokens == texts[which]
    assert not any(held[:, 0].any() for held in run.target.by_row().values()), "row 0 is padding"
