"""R56: sglang#33643.

A least length was counted in steps, so that runs of several tokens passed it late or ended texts
too early; penalties counted one token per step.

Before ``min_new_tokens`` tokens no end is drawn, wherever in a run they lie; from there on it is,
within the same run and within the same tree.
"""

from __future__ import annotations

from functools import cache

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.sampling.params import SamplingParams
from tests.processors import greedy_text
from tests.regressions.known import Known
from tests.samples import half, on_cpu
from tests.tiny import TinyDraft, TinyTarget
from tests.worlds import DEVICE

LEASTS, NEW = range(1, 13), 24
PROMPTS = [[least, 14, 15, 9] for least in LEASTS]
TREES = {"run": (6, 1, 7), "chain": (3, 1, 4), "tree": (3, 3, 9)}


@cache
def oracle(penalty: float) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """An end for every prompt, which the target wants early and again later on; and its text.

    The first texts hold the end before the least length, the others do not.
    """
    target, params = TinyTarget(device=DEVICE), SamplingParams(frequency_penalty=penalty)
    ends, free, texts = [], [], []
    for least, prompt in zip(LEASTS, PROMPTS, strict=True):
        free.append(greedy_text(target, prompt, NEW, params))
        early = free[-1][: least + 8]
        ends.append(max(early[: least + 4], key=early.count))
        texts.append(
            greedy_text(target, prompt, NEW, params, ends=(ends[-1],), min_new_tokens=least)
        )
    return ends, free, texts


@on_cpu(half, "tree", "penalty")
@pytest.mark.parametrize("penalty", [0.0, 0.4])
@pytest.mark.parametrize("tree", TREES)
def test_texts_end_as_plain_ones_do(tree, penalty):
    ends, free, texts = oracle(penalty)
    params = SamplingParams(frequency_penalty=penalty)
    draft = TinyDraft(device=DEVICE)
    if tree == "run":
        both = zip([*PROMPTS, *PROMPTS], [*texts, *free], strict=True)
        draft = Known([*prompt, *text] for prompt, text in both)
    config = SpecConfig(*TREES[tree], 64, len(LEASTS))
    run = Engine(TinyTarget(device=DEVICE), draft, config, buckets=[12])
    outs = run.generate(
        Request(prompt, NEW, params, stop_token_ids=[end], min_new_tokens=least)
        for prompt, end, least in zip(PROMPTS, ends, LEASTS, strict=True)
    )
    for out, text, end in zip(outs, texts, ends, strict=True):
        assert out.tokens == (text[: text.index(end) + 1] if end in text else text)
    ended = [pair for pair in zip(LEASTS, outs, strict=True) if pair[1].finish_reason == "stop"]
    assert len(ended) > 5
    assert any(len(out.tokens) == least + 1 for least, out in ended), "as early as possible"
    passed = [len(out.tokens) - out.accept_lens[-1] < least for least, out in ended if out.steps]
    assert any(passed) or tree != "run", "a run passes the least length and ends the text"
