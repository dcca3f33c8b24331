"""Whatever is asked of an engine in whatever order: texts, books, and the order of events."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.errors import CapacityError
from specattn.speculative.proposers.lookup import LookupFirst, LookupProposer
from specattn.speculative.sampling.params import SamplingParams
from tests.books import check_books
from tests.churn import Dice, Texts
from tests.speculative.test_host_plans import PlanningBackend
from tests.tiny import TinyBlockDraft, TinyDraft, TinyTarget, dense_greedy

CONTEXT, ROWS = 64, 4
TREE = SpecConfig(3, 4, 9, CONTEXT, ROWS)
SHARED = [7 * at % 61 for at in range(20)]
KINDS = [
    # three share a prefix
    Request([*SHARED, 5], 12),
    Request([*SHARED, 9, 2], 9),
    Request([*SHARED, 9], 15),
    Request([35], 9),
    # comes to its context's end
    Request([8] * 50, 99),
    Request([3, 14, 15, 9, 2], 9, SamplingParams(repetition_penalty=1.2, logprobs=3)),
    Request([58, 9, 7], 9, SamplingParams(0.9, min_p=0.05, presence_penalty=0.6, seed=8)),
]
GREEDY = [at for at, kind in enumerate(KINDS) if kind.sampling == SamplingParams()]
OTHERS = {"configs": [replace(TREE, num_steps=2, topk=1, num_draft_tokens=3), TREE.plain()]}
# draft, config and options
ENGINES = {
    "many slots": (TinyDraft, TREE, {"num_slots": 500}),
    "pages": (TinyDraft, replace(TREE, page_size=4), {}),
    "piecewise": (TinyDraft, TREE, {"cudagraph": "piecewise"}),
    "tbo": (TinyDraft, TREE, {"tbo": True}),
    "host plans": (TinyDraft, TREE, {"backend": PlanningBackend}),
    "any of three trees": (TinyDraft, TREE, OTHERS),
    "lookup before a block": (
        lambda: LookupFirst(LookupProposer(1, 4), TinyBlockDraft(4)),
        replace(TREE, topk=1, tree="best_first", ranks=3),
        {},
    ),
}


@cache
def engine(name: str) -> tuple[Engine, Texts, Dice]:
    """An engine, and what every kind comes to by itself; of greedy ones, by the dense model."""
    (draft, config, options), dice = ENGINES[name], Dice()
    policy = {"policy": dice} if "configs" in options else {}
    # few slots: four requests may want more
    settings = {"backend": "torch_native", "buckets": (1, ROWS), "num_slots": 84} | options | policy
    run = Engine(TinyTarget(), draft(), config, **settings)
    texts = Texts(run, KINDS)
    for at in GREEDY:
        count = min(KINDS[at].max_new_tokens, CONTEXT + 1 - len(KINDS[at].prompt))
        wanted = dense_greedy(run.target.model, KINDS[at].prompt, count)
        assert texts.alone[at].tokens == wanted
    return run, texts, dice


class EngineMachine(RuleBasedStateMachine):
    @initialize(name=st.sampled_from(sorted(ENGINES)), kinds=st.permutations(range(len(KINDS))))
    def start(self, name, kinds):
        self.run, self.texts, dice = engine(name)
        # of the same state for every example, whatever a failure has left
        dice.rng.seed(0)
        self.run.clear()
        self.slots = self.run.table.num_free_slots
        self.running, self.ended = [], []
        self.add(kinds[:2])

    @precondition(lambda self: len(self.running) < ROWS)
    @rule(kinds=st.lists(st.integers(0, len(KINDS) - 1), min_size=1, max_size=ROWS))
    def add(self, kinds):
        kinds = kinds[: ROWS - len(self.running)]
        try:
            self.running += zip(kinds, self.run.add([KINDS[at] for at in kinds]), strict=True)
        except CapacityError:
            # whoever ran still does
            assert self.run.num_running == len(self.running)
        self.note_ends()

    @precondition(lambda self: self.running)
    @rule(ahead=st.booleans(), count=st.integers(1, 3))
    def step(self, ahead, count):
        for _ in range(count):
            if not self.running:
                return
            try:
                gained = [result for result, _ in self.run.step(ahead=ahead)]
            except CapacityError:
                # all lack slots: one has to go
                return self.drop(0)
            assert not any(result is gone for result in gained for _, gone, _ in self.ended)
            self.note_ends()

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, ROWS - 1))
    def drop(self, at):
        """Also between the launch of a step and its reading, and in the midst of a prefix."""
        _, result = self.running[at % len(self.running)]
        self.run.drop(result)
        assert result.finish_reason == "dropped"
        assert result.finished_at >= result.first_token_at
        self.note_ends()
        with pytest.raises(ValueError, match="which runs in this engine"):
            self.run.drop(result)

    @precondition(lambda self: len(self.running) > 2)
    @rule()
    def clear(self):
        self.run.clear()
        assert {result.finish_reason for _, result in self.running} == {"dropped"}
        self.note_ends()

    def note_ends(self) -> None:
        over = [item for item in self.running if item[1].finish_reason]
        self.running = [item for item in self.running if not item[1].finish_reason]
        self.ended += [(at, result, list(result.tokens)) for at, result in over]

    @invariant()
    def the_books_are_right(self):
        assert self.run.num_running == len(self.running) == ROWS - self.run.table.num_free_rows
        check_books(self.run.table)
        if not self.running:
            assert self.run.table.num_free_slots == self.slots

    def teardown(self):
        while self.running:
            self.step(ahead=True, count=1)
        self.the_books_are_right()
        for at, result, tokens in self.ended:
            assert result.tokens == tokens, "it gained something after its end"
            if result.finish_reason != "dropped":
                assert len(tokens) == len(self.texts.alone[at].tokens)
        self.texts.hold([(at, result) for at, result, _ in self.ended])


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=14, stateful_step_count=20)
