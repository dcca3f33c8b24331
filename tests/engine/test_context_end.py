"""What requests step with next to their contexts' ends, and what is made for that."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from specattn.config import SpecConfig
from specattn.engine.configs import SpeculativeConfigs
from specattn.engine.engine import Engine, Request
from tests.books import check_books
from tests.engines import engine as tiny_engine
from tests.samples import half, on_cpu
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

CONTEXT = 48
PLAIN = (0, 1, 1)
# one of them comes to its end alone, two together, and the last has no room for any tree
PROMPTS = [[3, 1, 4], [3, 1, 4], list(range(1, 30)), list(range(1, CONTEXT))]


engine = partial(tiny_engine, context=CONTEXT, rows=3, device=DEVICE, buckets=(1, 3))


@on_cpu(half, "trees", "ahead")
@pytest.mark.parametrize("ahead", [False, True], ids=["waited", "ahead"])
@pytest.mark.parametrize(
    ("trees", "further"),
    [
        ([(5, 1, 6)], 1),
        ([(7, 8, 40)], 1),
        ([(5, 1, 6), (3, 1, 4)], 1),
        ([(7, 8, 40), (1, 1, 2), PLAIN], 0),
        ([PLAIN], 0),
    ],
    ids=str,
)
def test_at_most_one_decoder_is_made_and_texts_are_those_of_plain_decoding(trees, further, ahead):
    first = (lambda observed: observed.configs[0]) if len(trees) > 1 else None
    run = engine(*trees, policy=first)
    own, waiting, results = run.decoders, list(PROMPTS), []
    while waiting or run.num_running:
        room = run.table.num_free_rows
        results += run.add([Request(prompt, 99) for prompt in waiting[:room]])
        waiting = waiting[room:]
        run.step(ahead=ahead)
    for result, prompt in zip(results, PROMPTS, strict=True):
        assert result.finish_reason == "context"
        assert len(prompt) + len(result.tokens) == CONTEXT + 1
        assert result.tokens == dense_greedy(run.target.model, prompt, len(result.tokens))
    check_books(run.table)
    assert run.decoders[: len(own)] == own
    made = run.decoders[len(own) :]
    assert [decoder.config for decoder in made] == [run.config.plain()] * further
    for decoder in run.decoders:
        (part,) = decoder.modes
        assert not decoder.runner.stats.eager
        assert decoder.runner.captured(part) == ([3] if decoder in made else [1, 3])
        assert decoder.runner.recorded(part) == decoder.runner.recording
    assert list(run.graphs()) == [decoder.config for decoder in run.decoders]


@pytest.mark.parametrize("chosen", [0, 1])
def test_trees_of_any_ranks_end_in_the_same_plain_decoding(chosen):
    configs = [SpecConfig(3, 1, 8, CONTEXT, 3, tree="best_first", ranks=ranks) for ranks in (5, 2)]
    models, more = (TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)), {"configs": configs[1:]}
    run = Engine(*models, configs[0], policy=lambda observed: observed.configs[chosen], **more)
    (result,) = run.generate([Request([3, 1, 4], 99)])
    assert result.finish_reason == "context"
    assert result.tokens == dense_greedy(models[0], [3, 1, 4], CONTEXT - 2)
    assert [decoder.config for decoder in run.decoders[2:]] == [configs[0].plain()]


def test_nothing_is_made_for_contexts_that_do_not_end():
    run = engine((5, 1, 6))
    (result,) = run.generate([Request([3, 1, 4], 30)])
    assert result.finish_reason == "length"
    assert len(run.decoders) == 1


@pytest.mark.parametrize("draw", [False, True])
def test_the_deepest_setting_that_fits_is_taken(draw):
    deep, chain, short, plain = (
        SpecConfig(*tree, CONTEXT, draft_sampling=draw)
        for tree in ((5, 1, 6), (3, 1, 4), (1, 1, 2), PLAIN)
    )
    configs = SpeculativeConfigs([deep, short, chain], None, [1])
    fits = {room: configs.fit(deep, room) for room in (9, 6, 5, 4, 3, 2, 1)}
    last = replace(plain, draft_sampling=False)
    assert list(fits.values()) == [deep, deep, chain, chain, short, short, last]
    assert configs.fit(short, 9) is short, "what was chosen is not made larger"
    assert SpeculativeConfigs([deep, plain], None, [1]).fit(deep, 1) is plain


def test_decoders_of_other_settings_are_refused():
    run = engine((5, 1, 6))
    with pytest.raises(ValueError, match="config must be one of the engine's configs, got"):
        run.decoder(replace(run.config, num_steps=2, num_draft_tokens=3))
    assert len(run.decoders) == 1
