"""R71: vllm#48494, vllm#48329.

A draft length that changed from step to step gave negative widths, where the batch grew in the same
step.

Deep steps, plain ones and trees follow each other at random while requests join and end, with
grammars and with steps ahead; drafts of the host have any length up to the config's, and none. The
texts are those of plain decoding.
"""

from __future__ import annotations

import random
from functools import cache, partial

import pytest

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.proposers.host import HostTree
from specattn.speculative.proposers.lookup import LookupProposer
from specattn.speculative.sampling.params import SamplingParams
from tests.books import check_books
from tests.grammars import Remainders, constrained_text
from tests.regressions.known import Known
from tests.tiny import TinyBlockDraft, TinyDraft, TinyTarget, dense_greedy
from tests.worlds import BACKENDS, DEVICE

NEW, ROWS = 20, 4
PROMPTS = [[(3 + 11 * at * start) % 61 for at in range(1, 4 + 3 * start)] for start in range(1, 7)]
CONFIGS = [SpecConfig(*tree, 64, ROWS, 4) for tree in ((5, 1, 6), (0, 1, 1), (3, 4, 12), (1, 1, 2))]


@cache
def wanted() -> list[list[int]]:
    """What plain decoding writes; every third text under a grammar."""
    target = TinyTarget(device=DEVICE)
    return [
        dense_greedy(target, prompt, NEW - at)
        if at % 3
        else constrained_text(target, prompt, NEW - at, SamplingParams())
        for at, prompt in enumerate(PROMPTS)
    ]


class Ragged(Known):
    """As much of what follows as it likes."""

    def __init__(self) -> None:
        texts = zip(PROMPTS, wanted(), strict=True)
        super().__init__([*prompt, *text] for prompt, text in texts)
        self.rng = random.Random(5)

    def draft(self, requests, config):
        trees = super().draft(requests, config)
        return [HostTree(tree.tokens[: self.rng.randrange(6)]) for tree in trees]


DRAFTS = {
    "EAGLE": partial(TinyDraft, device=DEVICE),
    "DFlash": partial(TinyBlockDraft, device=DEVICE),
    "lookup": LookupProposer,
    "host": Ragged,
}


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_texts_are_those_of_plain_decoding(backend, kind):
    rng = random.Random(7)
    run = Engine(
        TinyTarget(device=DEVICE),
        DRAFTS[kind](),
        CONFIGS[0],
        configs=CONFIGS[1:],
        policy=lambda observed: rng.choice(observed.configs),
        backend=backend,
        # fewer than rows may ask for: none are kept ahead
        num_slots=160,
        buckets=[1, 2, ROWS],
    )
    late = [
        Request(prompt, NEW - at, grammar=None if at % 3 else partial(Remainders, prompt))
        for at, prompt in enumerate(PROMPTS)
    ]
    results = []
    while late or run.running:
        room = min(run.table.num_free_rows, rng.randrange(3))
        results += run.add(late[:room])
        del late[:room]
        if run.running:
            run.step(ahead=True)
    assert [result.tokens for result in results] == wanted()
    assert len(run.configs.used) == len(CONFIGS)
    assert max(n for result in results for n in result.accept_lens) > 2
    check_books(run.table)
