"""What is of another kind is refused by its name, and a good call afterwards works."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from specattn import (
    AsyncEngine,
    Engine,
    GoodputPolicy,
    KVPool,
    ModelSlot,
    Prefill,
    Prompt,
    Request,
    RequestStates,
    SamplingBatch,
    SamplingParams,
    SlotTable,
    SpecConfig,
    StepDecoder,
    StepSetup,
)
from specattn.batch import Candidates, Linked, Marginals
from specattn.models import fuse
from specattn.speculative.proposers.host import HostProposer, HostTree
from specattn.speculative.proposers.lookup import LookupFirst, LookupProposer
from specattn.speculative.proposers.proposer import BoundProposer, Proposer
from specattn.speculative.sampling.logits_processor import LogitsProcessor
from specattn.speculative.states import StateField
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import DEVICE

CONFIG = SpecConfig(3, 2, 6, 64, 2)
PROMPT, SLOTS = [3, 14, 15, 9, 26], 129
TORCH = {"backend": "torch_native"}


@dataclass
class Loop:
    """A loop of one's own, whose one request has run its prompt."""

    table: SlotTable
    states: RequestStates
    target: ModelSlot
    draft: ModelSlot
    prefill: Prefill
    decoder: StepDecoder
    sampling: SamplingBatch

    def __init__(self) -> None:
        setup = StepSetup.over(TinyTarget(device=DEVICE), TinyDraft(device=DEVICE), CONFIG, **TORCH)
        self.table, self.states = setup.table, setup.states
        self.target, self.draft = setup.slots
        self.prefill = Prefill.of(setup)
        self.decoder = self.decode()
        self.sampling = SamplingBatch.of([SamplingParams()], DEVICE)
        assert self.table.allocate() == 1
        self.table.reserve([1], [64])

    def decode(self, **change) -> StepDecoder:
        parts = {"target": self.target, "draft": self.draft, "config": CONFIG}
        parts |= {"table": self.table, "states": self.states, "buckets": [2]}
        return StepDecoder(**parts | change)

    def prefilled(self, **change) -> Prefill:
        parts = {"target": self.target, "draft": self.draft, "config": CONFIG}
        return Prefill(**parts | {"table": self.table} | change)

    def admit(self, start, **change) -> None:
        count = len(start.bonus_tokens)
        lens = torch.full((count,), len(PROMPT), dtype=torch.int32, device=DEVICE)
        parts = {"rows": torch.ones(count, dtype=torch.int64, device=DEVICE), "seq_lens": lens}
        parts |= {"bonus_tokens": start.bonus_tokens, "state": start.state}
        self.states.admit(**parts | {"sampling": self.sampling} | change)

    def text(self) -> list[int]:
        start = self.prefill.run([Prompt(1, PROMPT)], self.sampling)
        self.admit(start)
        tokens = start.bonus_tokens.tolist()
        while len(tokens) < 9:
            tokens += self.decoder.step([1])[0]
        return tokens[:9]


@pytest.fixture(scope="module")
def loop() -> Loop:
    return Loop()


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    return dense_greedy(TinyTarget(device=DEVICE), PROMPT, 9)


def pool(of) -> KVPool:
    return KVPool(of.layers, 10, DEVICE)


WRONG = {
    "decoder: swapped": (
        lambda it: it.decode(target=it.draft, draft=it.target),
        "draft must be what load_draft, .* returns, or a proposer, got a TinyTarget",
    ),
    "decoder: a draft as target": (
        lambda it: it.decode(target=it.draft, draft=None, config=CONFIG.plain()),
        "target must be the slot of a target model, got a TinyDraft",
    ),
    "decoder: models": (
        lambda it: it.decode(target=it.target.model),
        r"target must be a ModelSlot \(ModelSlot\.of\), got a TinyTarget",
    ),
    "decoder: a draft model": (
        lambda it: it.decode(draft=it.draft.model),
        "draft must be a ModelSlot, a Proposer or None, got a TinyDraft",
    ),
    "decoder: a proposer's class": (
        lambda it: it.decode(draft=LookupProposer),
        "draft must be a ModelSlot, a Proposer or None, got the class LookupProposer",
    ),
    "decoder: config": (lambda it: it.decode(config=5), "config must be a SpecConfig, got an int"),
    "decoder: states as table": (
        lambda it: it.decode(table=it.states),
        "table must be a SlotTable or an ExternalTable, got a RequestStates",
    ),
    "decoder: no states": (
        lambda it: it.decode(states=None),
        r"states must be RequestStates \(RequestStates\.alloc\), got None",
    ),
    "decoder: buckets": (
        lambda it: it.decode(buckets=4),
        "buckets must be a sequence of batch sizes, got 4",
    ),
    "decoder: processors": (
        lambda it: it.decode(processors={}),
        "processors must be ProcessorStates, got a dict",
    ),
    "decoder: accept": (lambda it: it.decode(accept=1), "accept must be callable, got an int"),
    "decoder: capturing": (
        lambda it: it.decode(capturing=1),
        "capturing must be callable, got an int",
    ),
    "step: a row": (
        lambda it: it.decoder.step_async(5),
        "rows must be a sequence of table rows, got 5",
    ),
    "step: between": (
        lambda it: it.decoder.step_async([1], between=5),
        "between must be callable, got an int",
    ),
    "step: grammars": (
        lambda it: it.decoder.step_async([1], grammars=5),
        "grammars must be a sequence of Grammar or None, got 5",
    ),
    "phases: a row": (
        lambda it: it.decoder.phases(5),
        "rows must be a sequence of table rows, got 5",
    ),
    "phases: nobody": (lambda it: it.decoder.phases([]), "rows must be at least one, got none"),
    "slot: another's pool": (
        lambda it: ModelSlot.of(it.draft.model, pool(it.target.model), "torch_native"),
        r"pool must have the model's 1 layers, got 2",
    ),
    "slot: a pool of other layers": (
        lambda it: ModelSlot.of(
            TinyTarget(window=6, device=DEVICE), pool(it.target.model), "torch_native"
        ),
        r"pool\.layers\[1\] must be the model's, AttnConfig\(.*window_left=6.* got AttnConfig\(",
    ),
    "slot: a class": (
        lambda it: ModelSlot.of(TinyTarget, pool(it.target.model), "torch_native"),
        "model must be a target or a draft model, got the class TinyTarget",
    ),
    "slot: no pool": (
        lambda it: ModelSlot.of(it.target.model, it.target.model.layers, "torch_native"),
        "pool must be a KVPool or a HybridPool, got a tuple",
    ),
    "slot: backend": (
        lambda it: ModelSlot.of(it.target.model, pool(it.target.model), 5),
        "backend must be callable, got an int",
    ),
    "pool: a model": (
        lambda it: KVPool(it.target.model, 10, DEVICE),
        "layers must be a sequence of AttnConfig, .*, got a TinyTarget$",
    ),
    "pool: a dict": (
        lambda it: KVPool(({},), 10, DEVICE),
        "every layer must be an AttnConfig, got a dict",
    ),
    "pool: caches": (
        lambda it: KVPool.from_external(it.target.model.layers, 5, 5),
        "k must be a sequence of tensors, got 5",
    ),
    "pool: a cache": (
        lambda it: KVPool.from_external(it.target.model.layers, [5] * 2, [5] * 2),
        r"k\[0\] must be a tensor, got an int",
    ),
    "prefill: swapped": (
        lambda it: it.prefilled(target=it.draft, draft=it.target),
        "target must be the slot of a target model, got a TinyDraft",
    ),
    "prefill: a table": (
        lambda it: it.prefilled(table=[it.table]),
        "table must be a SlotTable, an ExternalTable or req_to_token, got a list",
    ),
    "prefill: config": (
        lambda it: it.prefilled(config=None),
        "config must be a SpecConfig, got None",
    ),
    "run: ids": (
        lambda it: it.prefill.run([PROMPT], it.sampling),
        r"every prompt must be a Prompt\(row, tokens\), got \[3, 14, 15, 9, 26\]",
    ),
    "run: a prompt": (
        lambda it: it.prefill.run(Prompt(1, PROMPT), it.sampling),
        r"prompts must be a sequence of Prompt, got Prompt\(row=1",
    ),
    "run: a token": (
        lambda it: it.prefill.run([Prompt(1, 5)], it.sampling),
        "every prompt token must be a whole number of a sequence, got 5",
    ),
    "run: sampling": (
        lambda it: it.prefill.run([Prompt(1, PROMPT)], SamplingParams()),
        r"sampling must be a SamplingBatch \(SamplingBatch\.of\), got a SamplingParams",
    ),
    "states: fields": (
        lambda it: RequestStates.alloc(3, None, DEVICE),
        "state_fields must be a mapping of names to StateField, got None",
    ),
    "states: a field": (
        lambda it: RequestStates.alloc(3, {"a": 1}, DEVICE),
        r"state_fields\['a'\] must be a StateField, got an int",
    ),
    "reserve: a row": (
        lambda it: it.table.reserve(1, [5]),
        "every row must be a whole number of a sequence, got 1",
    ),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_a_loop_of_ones_own_is_told_what_is_wrong(loop, wanted, call, message):
    with pytest.raises(ValueError, match=message):
        call(loop)
    assert loop.text() == wanted


ADMITTED = {
    "row 0": ({"rows": torch.tensor([0])}, r"rows must be distinct rows 1\.\.2, got \[0\]"),
    "row outside": ({"rows": torch.tensor([9])}, r"rows must be distinct rows 1\.\.2, got \[9\]"),
    "a row": ({"rows": 1}, r"rows must be \[B\] torch\.int64, got 1"),
    "int32": (
        {"rows": torch.tensor([1], dtype=torch.int32)},
        r"rows must be \[B\] torch\.int64, got \[1\] torch\.int32",
    ),
    "no state": ({"state": None}, "state must be a mapping of fields to tensors, got None"),
    "another's": (
        {"state": {"x": torch.zeros(1, 1)}},
        r"state must be of the fields \['draft_probs', .*'topk_tokens'\], got \['x'\]",
    ),
    "params": (
        {"sampling": SamplingParams()},
        "sampling must be a SamplingBatch .*, got a SamplingParams",
    ),
}


@pytest.mark.parametrize(("change", "message"), ADMITTED.values(), ids=ADMITTED)
def test_what_is_admitted_is_looked_at_first(loop, wanted, change, message):
    start = loop.prefill.run([Prompt(1, PROMPT)], loop.sampling)
    before = {name: table.clone() for name, table in loop.states.tensors().items()}
    with pytest.raises(ValueError, match=message):
        loop.admit(start, **change)
    for name, table in loop.states.tensors().items():
        assert torch.equal(table, before[name])
    assert loop.text() == wanted


def test_a_row_is_admitted_once(loop):
    sampling = SamplingBatch.of([SamplingParams()] * 2, DEVICE)
    start = loop.prefill.run([Prompt(1, PROMPT)] * 2, sampling)
    with pytest.raises(ValueError, match=r"rows must be distinct rows 1\.\.2, got \[1, 1\]"):
        loop.admit(start, rows=torch.tensor([1, 1]), sampling=sampling)


ENGINES = {
    "config": ({"config": 5}, "config must be a SpecConfig, got an int"),
    "a class": ({"config": SpecConfig}, "config must be a SpecConfig, got the class SpecConfig"),
    "configs": ({"configs": 5}, "configs must be a sequence of SpecConfig, got 5"),
    "one of them": ({"configs": [5]}, "every one of configs must be a SpecConfig, got an int"),
    "buckets": ({"buckets": 4}, "buckets must be a sequence of batch sizes, got 4"),
    "swapped": (
        {"target": TinyDraft(), "draft": TinyTarget()},
        r"target must be an HFTarget \(.*\) or another model, got a TinyDraft",
    ),
    "a target as draft": (
        {"draft": TinyTarget()},
        "draft must be what load_draft, .* returns, or a proposer, got a TinyTarget",
    ),
    "target's class": ({"target": TinyTarget}, "target must be .*, got the class TinyTarget"),
    "draft's class": ({"draft": TinyDraft}, "draft must be .*, got the class TinyDraft"),
    "proposer's class": ({"draft": HostProposer}, "draft must be .*, got the class HostProposer"),
    "policy": (
        {"configs": [CONFIG.plain()], "policy": GoodputPolicy},
        "policy must be callable, as a GoodputPolicy is, got the class GoodputPolicy",
    ),
    "processors": (
        {"processors": LogitsProcessor},
        "processors must be a sequence of LogitsProcessor, got <class",
    ),
    "one processor": (
        {"processors": [LogitsProcessor]},
        "every processor must be a LogitsProcessor, got the class LogitsProcessor",
    ),
    "a function": (
        {"processors": [lambda logits: logits]},
        "every processor must be a LogitsProcessor, got a function",
    ),
    "detokenize": ({"detokenize": "x"}, "detokenize must be callable, got a str"),
    "backend": ({"backend": 5}, "backend must be callable, got an int"),
}


@pytest.mark.parametrize(("change", "message"), ENGINES.values(), ids=ENGINES)
def test_an_engine_is_made_of_what_it_says(change, message):
    parts = {"target": TinyTarget(), "draft": TinyDraft(), "config": CONFIG}
    with pytest.raises(ValueError, match=message):
        Engine(**TORCH | parts | change)


def test_what_wraps_an_engine_or_a_model_is_given_one():
    with pytest.raises(ValueError, match="engine must be an Engine, got a str"):
        AsyncEngine("x")
    with pytest.raises(ValueError, match=r"target must be an HFTarget .*, got a TinyTarget"):
        fuse(TinyTarget())


class Nameless(LogitsProcessor):
    def process(self, logits, nodes, states):
        return logits


class OddFields(Nameless):
    name = "odd"

    def state_fields(self):
        return {"a": 1}


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (Nameless(), r"Nameless\.name must be a text, got None"),
        (OddFields(), r"state_fields\['odd\.a'\] must be a StateField, got an int"),
    ],
    ids=["name", "fields"],
)
def test_a_processor_says_what_it_is(processor, message):
    with pytest.raises(ValueError, match=message):
        Engine(TinyTarget(), TinyDraft(), CONFIG, processors=[processor], processed=True, **TORCH)


class Bound(BoundProposer):
    def propose(self):
        return self.proposer.proposed

    def absorb(self, accepted):
        return self.proposer.kept


class Odd(Proposer):
    """Returns what it is told to."""

    def __init__(self, proposed=None, *, kept=None, read=None, bound=Bound) -> None:
        self.proposed, self.kept, self.read, self.bound = proposed, kept or {}, read or {}, bound

    def state_fields(self, config):
        return {"own": StateField(1, torch.int64)}

    def bind(self, step):
        return self.bound(self, step) if callable(self.bound) else self.bound

    def prompt(self, chunk):
        return self.read


def numbers(*shape: int, dtype=torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def floats(*shape: int) -> torch.Tensor:
    return numbers(*shape, dtype=torch.float32)


PROBS = floats(2, 3, 0)
GOOD = Candidates(floats(2, 10), numbers(2, 10), numbers(2, 5), PROBS)
RETURNED = {
    "nothing bound": (Odd(bound=3), "what Odd.bind returns must be a BoundProposer, got an int"),
    "nothing": (
        Odd(),
        "what Bound.propose returns must be Candidates, Marginals or Linked, got None",
    ),
    "tokens": (
        Odd(numbers(2, 6)),
        "what Bound.propose returns must be Candidates, .*, got a Tensor",
    ),
    "scores": (
        Odd(Candidates(floats(2, 9), numbers(2, 9), numbers(2, 5), PROBS)),
        r"Bound\.propose: scores must be \[2, 10\] torch\.float32 .*, got \[2, 9\]",
    ),
    "parents": (
        Odd(Candidates(floats(2, 10), numbers(2, 10), numbers(2, 10), PROBS)),
        r"Bound\.propose: parents must be \[2, 5\] torch\.int64 .*, got \[2, 10\]",
    ),
    "marginals": (
        Odd(Marginals(floats(2, 3, 2), numbers(2, 2), PROBS)),
        r"Bound\.propose: tokens must be \[2, 3, 2\] torch\.int64 .*, got \[2, 2\]",
    ),
    "linked": (
        Odd(Linked(numbers(2, 6), None)),
        r"Bound\.propose: parents must be \[2, 6\] torch\.int64 .*, got None",
    ),
    "chosen": (
        Odd(Linked(numbers(2, 6), numbers(2, 6), numbers(2), GOOD)),
        r"Bound\.propose: chosen must be \[2\] torch\.int32 .*, got \[2\] torch\.int64",
    ),
    "fallback": (
        Odd(Linked(numbers(2, 6), numbers(2, 6), numbers(2, dtype=torch.int32), PROMPT)),
        "what Bound.propose returns must be Candidates, .*, got a list",
    ),
    "behind a lookup": (
        LookupFirst(LookupProposer(1, 3), Odd(bound=3)),
        "what Odd.bind returns must be a BoundProposer, got an int",
    ),
    "kept": (
        Odd(GOOD, kept=[3]),
        "what Bound.absorb returns must be a mapping of fields to tensors, got a list",
    ),
    "another's": (
        Odd(GOOD, kept={"x": numbers(2, 1)}),
        r"what Bound.absorb returns must be of the fields \['own'\], got \['x'\]",
    ),
    "read": (
        Odd(GOOD, read=[3]),
        "what Odd.prompt returns must be a mapping of fields to tensors, got a list",
    ),
}


@pytest.mark.parametrize(("proposer", "message"), RETURNED.values(), ids=RETURNED)
def test_what_a_proposer_returns_is_named(proposer, message):
    """Where steps are made, or run for the first time."""

    def run() -> None:
        options = {"buckets": [2], "graphs": False, **TORCH}
        engine = Engine(TinyTarget(device=DEVICE), proposer, CONFIG, **options)
        engine.generate([Request(PROMPT, 4), Request(PROMPT, 4)])

    with pytest.raises(ValueError, match=message):
        run()


def test_what_is_right_is_taken():
    proposer = Odd(GOOD, kept={"own": numbers(2, 1)}, read={"own": numbers(1, 1)})
    engine = Engine(TinyTarget(device=DEVICE), proposer, CONFIG, buckets=[2], **TORCH)
    (out,) = engine.generate([Request(PROMPT, 4)])
    assert out.tokens == dense_greedy(TinyTarget(device=DEVICE), PROMPT, 4)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "what Told.draft returns must be a sequence of HostTree, got None"),
        ([HostTree(5)], "Told, request 0: every token must be a whole number of a sequence, got 5"),
        ([HostTree([5], 5)], "request 0: every parent must be a whole number of a sequence, got 5"),
    ],
    ids=["nothing", "a token", "a parent"],
)
def test_what_the_host_drafts_is_named(returned, message):
    class Told(HostProposer):
        def draft(self, requests, config):
            return returned

    engine = Engine(TinyTarget(device=DEVICE), Told(), CONFIG, **TORCH)
    with pytest.raises(ValueError, match=message):
        engine.generate([Request(PROMPT, 4)])
