"""R40: sglang#23336, sglang#24055.

Switching the number of steps at run time allocated a negative size; settings with different
largest batches had different metadata, and acceptance oscillated.

Settings share the request states, the slots and the largest batch, and others are refused. Under
a setting that changes with every one of 100 steps the text is that of plain decoding, every slot
that a step asks for is past what is committed, and a step gains what it would have gained had the
text been a prompt.
"""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from tests.books import check_books
from tests.engines import engine as tiny_engine
from tests.tiny import dense_greedy
from tests.worlds import BACKENDS, DEVICE

PROMPTS = [[3, 14, 15, 9, 26, 5], [8, 9, 7, 9]]
STEPS, CONTEXT = 100, 400
CONFIGS = [SpecConfig(*tree, CONTEXT, 2) for tree in ((3, 1, 4), (1, 1, 2), (3, 8, 12), (0, 1, 1))]


def engine(backend, *configs, **options) -> Engine:
    options |= {"device": DEVICE, "backend": backend, "buckets": [2]}
    return tiny_engine(CONFIGS[0], *configs, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hundred_steps_of_alternating_settings(backend, monkeypatch):
    order = cycle(CONFIGS)
    run = engine(backend, *CONFIGS[1:], policy=lambda observed: next(order))
    results = run.add([Request(prompt, CONTEXT) for prompt in PROMPTS])
    asked, reserve = [], run.table.reserve
    monkeypatch.setitem(
        vars(run.table),
        "reserve",
        lambda rows, lens: (
            asked.append([need - live.length for live, need in zip(run.running, lens, strict=True)])
            or reserve(rows, lens)
        ),
    )
    for step in range(STEPS):
        before = [list(live.tokens) for live in run.running]
        run.step()
        config = CONFIGS[step % 4]
        assert asked.pop() == [config.reserve_len] * 2
        if step % 23 == 9:
            gained = [result.accept_lens[-1] for result in results]
            assert gained == from_scratch(backend, config, before), f"step {step}, {config}"
    check_books(run.table)
    for result, prompt in zip(results, PROMPTS, strict=True):
        assert result.tokens == dense_greedy(run.target.model, prompt, len(result.tokens))
    assert max(max(result.accept_lens) for result in results) == 4
    assert set(run.configs.used.values()) == {STEPS // 4}
    assert {tuple(decoder.runner.buckets) for decoder in run.decoders} == {(2,)}
    draft_is_that_of_the_text(run, backend)


def from_scratch(backend, config: SpecConfig, texts: list[list[int]]) -> list[int]:
    """What one step gains whose texts were prompts; the first token after them is drawn again."""
    fresh = engine(backend, *CONFIGS[1:], policy=lambda observed: config)
    results = fresh.add([Request(text[:-1], CONTEXT) for text in texts])
    assert [result.tokens for result in results] == [text[-1:] for text in texts]
    fresh.step()
    return [result.accept_lens[-1] for result in results]


def draft_is_that_of_the_text(run: Engine, backend) -> None:
    """Proposals, hidden states and the draft's KV are those of a prefill."""
    fresh = engine(backend, *CONFIGS[1:])
    fresh.add([Request(live.tokens[:-1], CONTEXT) for live in run.running])
    for live, other in zip(run.running, fresh.running, strict=True):
        for name, ours in run.states.drafting.items():
            theirs = fresh.states.drafting[name]
            torch.testing.assert_close(ours[live.row], theirs[other.row], rtol=1e-3, atol=1e-4)
        for name in ("k", "v"):
            kv = [
                getattr(one.draft.pool, name)[:, one.table.req_to_token[at.row, : at.length].long()]
                for one, at in ((run, live), (fresh, other))
            ]
            torch.testing.assert_close(*kv, rtol=1e-3, atol=1e-4)


def test_settings_have_one_largest_batch():
    other = SpecConfig(1, 1, 2, CONTEXT, 3)
    with pytest.raises(ValueError, match="max_num_reqs must be the same in all configs, got 2 and"):
        engine("torch_native", other)
