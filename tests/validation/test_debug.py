"""`validate="debug"` looks at what tensors hold, too."""

from __future__ import annotations

import pytest
import torch

from specattn import Engine, Request, SpecConfig
from specattn.batch import ForwardMode
from specattn.cuda_graph import GraphRunner
from specattn.errors import TreeError
from tests.speculative.stepping import admitted, engine
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.validation.steps import LENS, PADDED, Failing, same, step_of
from tests.worlds import DEVICE


@pytest.fixture(scope="module")
def debug():
    return step_of(validate="debug")


def test_debugging_looks_at_the_lengths_on_the_host(debug, wanted):
    with pytest.raises(ValueError, match=r"seq_lens must be seq_lens_cpu \[5, 17\], got \[5, 16\]"):
        debug.run(seq_lens=torch.tensor([5, 16]))
    assert not Failing.ran
    same(debug.outcome(), wanted)


SLOTS = {
    "unreserved": (20, 0, r"slot of row \d+, position 20 must be 1\.\.\d+, got 0"),
    "outside": (3, 2**30, r"slot of row \d+, position 3 must be 1\.\.\d+, got 1073741824"),
    "negative": (3, -4, r"slot of row \d+, position 3 must be 1\.\.\d+, got -4"),
    "not_in_its_page": (2, 1, r"position 2 must be number 2 of a page of 4 \(page_size\)"),
    "borrowed": (18, None, r"slots row \d+ writes must be its own, got \["),
}


@pytest.mark.parametrize(("position", "slot", "message"), SLOTS.values(), ids=SLOTS)
def test_debugging_looks_at_the_slots(debug, wanted, position, slot, message):
    table, (first, row) = debug.one.table.req_to_token, debug.one.rows[:2]
    before = int(table[row, position])
    debug.prepare()
    table[row, position] = table[first, LENS[0] + 1] if slot is None else slot
    with pytest.raises(ValueError, match=message):
        debug.go()
    assert not Failing.ran
    table[row, position] = before
    same(debug.outcome(), wanted)


@pytest.mark.parametrize("writer", [0, 1])
def test_debugging_looks_for_writes_into_other_prefixes(debug, wanted, writer):
    table, rows = debug.one.table.req_to_token, debug.one.rows[:2]
    row, other, page = rows[writer], rows[1 - writer], LENS[writer] // 4 + 1
    own = table[row, 4 * page : 4 * page + 4]
    before = own.clone()
    debug.prepare()
    own.copy_(table[other, :4])
    with pytest.raises(ValueError, match=f"slots row {row} writes must be its own, got"):
        debug.go()
    assert not Failing.ran
    own.copy_(before)
    same(debug.outcome(), wanted)


TREES = {
    "cycle": ("next_token", lambda t: t * 0 + 1, TreeError, "cycle, or a second parent"),
    "missing": ("next_token", lambda t: t * 0 - 1, TreeError, "missing parent"),
    "words": ("words", lambda t: t | 2, TreeError, r"words name nodes \[.*\], its path is \["),
    "tokens": ("tokens", lambda t: t + 61, ValueError, r"tree.tokens must be 0\.\.60, got"),
    "positions": ("tree_positions", lambda t: t + 1, ValueError, "tree.positions must be .* got"),
}


@pytest.mark.parametrize(("field", "spoil", "error", "message"), TREES.values(), ids=TREES)
def test_debugging_looks_at_the_tree(debug, wanted, monkeypatch, field, spoil, error, message):
    """A draft that leaves another tree: the target has not run then."""
    (step,), replay = debug.one.decoder._launches[4].steps, GraphRunner.replay
    buffer, nodes = getattr(step.buffers, field), PADDED * debug.one.decoder.config.num_draft_tokens

    def spoiled(runner, part, captured):
        replay(runner, part, captured)
        if part.mode is ForwardMode.DRAFT_DECODE:
            buffer.copy_(spoil(buffer))

    with monkeypatch.context() as patch:
        patch.setattr(GraphRunner, "replay", spoiled)
        with pytest.raises(error, match=message):
            debug.run()
    assert nodes not in Failing.ran
    same(debug.outcome(), wanted)


@pytest.mark.parametrize("length", [-1, -(2**31)])
def test_debugging_refuses_a_negative_committed_length(length):
    run = engine((3, 1, 4), validate="debug")
    rows, decoder = admitted(run), run.decoder(run.config)
    lens = run.states.seq_lens
    before = lens[rows[1]].clone()
    lens[rows[1]] = length
    with pytest.raises(
        ValueError, match=rf"^seq_lens must be 0\.\.92, got \[6, {length}, 4, 3, 1\]"
    ):
        decoder.step(rows)
    lens[rows[1]] = before
    assert all(decoder.step(rows))


def test_an_engine_may_validate_every_step():
    target, config = TinyTarget(device=DEVICE), SpecConfig(4, 2, 7, max_context_len=64)
    run = Engine(target, TinyDraft(device=DEVICE), config, validate="debug")
    prompts = [list(range(1, 30)), list(range(1, 25)), [7]]
    out = run.generate([Request(prompt, max_new_tokens=30) for prompt in prompts])
    for prompt, result in zip(prompts, out, strict=True):
        assert result.tokens == dense_greedy(target, prompt, 30)
