"""Engines whose requests are stepped by hand: several rows, odd prompts, all slots reserved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specattn.engine.engine import Engine, Request
from specattn.speculative.sampling.params import SamplingParams
from tests.engines import engine as tiny_engine
from tests.worlds import DEVICE

if TYPE_CHECKING:
    from specattn.speculative.step.decoder import StepDecoder

PROMPTS = [[3, 14, 15, 9, 26, 5], [35, 2], [8, 9, 7, 9], [32, 38, 4], [6]]
SETTINGS = {"plain": (0, 1, 1), "chain": (3, 1, 4), "tree": (3, 4, 9)}
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=7)


def engine(tree, backend="torch_native", page: int = 1, **options) -> Engine:
    options = {"backend": backend, "page_size": page} | options
    return tiny_engine(tree, context=96, rows=5, **options)


def admitted(run: Engine, prompts=PROMPTS, **request) -> list[int]:
    """Run prompts and reserve all they may ever need; returns their rows."""
    run.add([Request(prompt, 80, **request) for prompt in prompts])
    rows = [live.row for live in run.running]
    run.table.reserve(rows, [run.config.max_context_len] * len(rows))
    return rows


def hold_up() -> None:
    """Let the device come to what is launched next long after the host."""
    if DEVICE.type == "cuda":
        torch.cuda._sleep(10_000_000)


def told_of_itself(run: Engine, decoder: StepDecoder, rows: list[int]) -> None:
    """Assert that a step's tokens are those that it left on the device."""
    before = run.states.seq_lens[rows].tolist()
    pending = decoder.step_async(rows)
    gained = pending.wait()
    assert pending.ready
    after, bonus = run.states.seq_lens[rows].tolist(), run.states.bonus_tokens[rows].tolist()
    assert [len(new) for new in gained] == [b - a for a, b in zip(before, after, strict=True)]
    assert [new[-1] for new in gained] == bonus
