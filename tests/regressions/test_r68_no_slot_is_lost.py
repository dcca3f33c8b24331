"""R68: sgl-project/sglang-jax#1147, sglang#27789.

Slots leaked: two pages per request with large pages, or one at a time where windows met pages of
several tokens, until nothing could be admitted any more.

When nothing runs, every slot is free: after requests that ended, were dropped, shared a prompt,
were refused for want of slots, or made others sit out a step, with pages of any size.
"""

from __future__ import annotations

import random
from contextlib import suppress

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.errors import CapacityError
from specattn.speculative.sampling.params import SamplingParams
from tests.books import check_books
from tests.samples import sampled, star
from tests.tiny import TinyDraft, TinyTarget
from tests.worlds import DEVICE

ROWS, CONTEXT = 8, 128
TEXT = [7 * at % 61 for at in range(CONTEXT)]


def requests(rng: random.Random) -> list[Request]:
    """One, or several of one prompt, of which many begin alike."""
    start = rng.choice([0, 0, 5])
    prompt = TEXT[start : start + rng.randrange(1, 50)]
    one = Request(prompt, rng.randrange(1, 12), SamplingParams(rng.choice([0, 0.9]), seed=3))
    return one.samples(rng.choice([1, 1, 3]))


@sampled(star, page=[16, 1, 64], pages=["few", "many"])
def test_all_slots_are_free_when_nothing_runs(page, pages):
    rng = random.Random(page)
    # few: one of the rows reaches the longest context
    slots = page + CONTEXT if pages == "few" else None
    config = SpecConfig(3, 4, 9, CONTEXT, ROWS, page)
    models = TinyTarget(device=DEVICE, window=9), TinyDraft(device=DEVICE)
    run = Engine(*models, config, num_slots=slots, buckets=[ROWS])
    free, done, refused, dropped = run.table.num_free_slots, 0, 0, 0
    while done < 30 or run.running:
        assert run.running or run.table.num_free_slots == free
        asked = requests(rng)
        if done < 30 and len(asked) <= run.table.num_free_rows:
            try:
                done += len(run.add(asked))
            except CapacityError:
                refused += 1
        if run.running and rng.random() < 0.15:
            run.drop(rng.choice(run.running).result)
            dropped += 1
        if run.running:
            with suppress(CapacityError):
                run.step(ahead=rng.random() < 0.7)
                continue
            # nobody has slots for a step
            run.drop(rng.choice(run.running).result)
    assert dropped
    assert refused or pages == "many"
    check_books(run.table)
    assert run.table.num_free_slots == free
    assert run.table.num_free_rows == ROWS
