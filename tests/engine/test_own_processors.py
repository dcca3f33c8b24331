"""Logits processors of a user's own: plain decoding's tokens and distributions, whatever drafts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.proposers.lookup import LookupProposer
from specattn.speculative.sampling.logits_processor import (
    LogitsProcessor,
    OwnProcessors,
    StateField,
)
from specattn.speculative.sampling.params import SamplingParams
from specattn.speculative.sampling.processors import ProcessorStates
from specattn.speculative.step.level import Level
from tests import processors as built_in
from tests.own_processors import Budget, ForgetsThePath, LastPenalty, NoNgram, own, processed
from tests.processors import dense_logits
from tests.processors import three_tokens as distribution_of
from tests.speculative import three_tokens
from tests.tiny import TinyBlockDraft, TinyDraft, TinyTarget
from tests.worlds import DEVICE

CHAIN, TREE = SpecConfig(3, 1, 4, 64, 5), SpecConfig(3, 3, 9, 64, 5)
BEST_FIRST = SpecConfig(3, 1, 7, 64, 5, tree="best_first", ranks=4)
WAYS = {
    "plain": (None, SpecConfig(0, 1, 1, 64, 5), {}),
    "chain": (TinyDraft, CHAIN, {}),
    "tree": (TinyDraft, TREE, {}),
    "parts": (TinyDraft, TREE, {"cudagraph": "piecewise"}),
    "checked": (TinyDraft, TREE, {"validate": "debug"}),
    "two batches": (TinyDraft, TREE, {"tbo": True}),
    "best first": (TinyBlockDraft, BEST_FIRST, {}),
    "lookup": (lambda **_: LookupProposer(1, 3), CHAIN, {}),
    "block": (TinyBlockDraft, CHAIN, {}),
}
PROMPTS = ([3, 14, 15, 9, 14], [35], [2, 7, 1, 8, 2, 8], [5, 5], [6, 9])
ASKED = [
    {"last": -5.0},
    {"no 2-gram": None, "budget": (17, 2)},
    {},
    {"last": -3.0, "no 3-gram": None},
    {"budget": (45, 1)},
]
COUNT = 24
PARAMS = [SamplingParams(processors=asked) for asked in ASKED]
PARAMS[3] = replace(PARAMS[3], frequency_penalty=0.3)
FREE = SamplingParams()


def scores(target, prompt, output, params):
    logits = dense_logits(target, [*prompt, *output])
    return processed(
        built_in.processed(logits, prompt, output, params), prompt, output, dict(params.processors)
    )


@cache
def greedy_text(prompt: int, asked: int | None = None) -> list[int]:
    """What plain decoding writes after one of the prompts, by one of the params or `FREE`."""
    target, output = TinyTarget(device=DEVICE), []
    params = FREE if asked is None else PARAMS[asked]
    for _ in range(COUNT):
        found = scores(target, PROMPTS[prompt], output, params)
        output.append(found.index(max(found)))
    return output


def engine(way: str, processors=None, **more) -> Engine:
    draft, config, options = WAYS[way]
    drafting = draft(device=DEVICE) if draft is not None else None
    added = own() if processors is None else processors
    options = {"buckets": [config.max_num_reqs]} | options | more
    return Engine(TinyTarget(device=DEVICE), drafting, config, processors=added, **options)


@pytest.mark.parametrize("way", WAYS)
def test_greedy_texts_are_those_of_plain_decoding(way):
    """Some ask for two, one for none, one for built-in ones, too."""
    run = engine(way, buckets=[2, 5])
    requests = [Request(*pair) for pair in zip(PROMPTS, [COUNT] * 5, PARAMS, strict=True)]
    outs = run.generate(requests)
    for at, (request, out) in enumerate(zip(requests, outs, strict=True)):
        assert out.tokens == greedy_text(at, at)
        assert (out.tokens == greedy_text(at)) == (not request.levels)
    if way != "plain":
        assert max(n for out in outs for n in out.accept_lens) > 1
    # rows that others have left, and requests that ask for other things in them
    again = [Request(prompt, 10, PARAMS[at - 1]) for at, prompt in enumerate(PROMPTS)]
    for at, out in enumerate(run.generate(again)):
        assert out.tokens == greedy_text(at, (at - 1) % 5)[:10]


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_first_tokens_of_several_forwards_are_their_own_requests(chunk):
    run = engine("tree")
    run._admission.prompts.chunk = chunk
    requests = [Request(*pair) for pair in zip(PROMPTS, [4] * 5, PARAMS, strict=True)]
    for at, out in enumerate(run.generate(requests)):
        assert out.tokens == greedy_text(at, at)[:4]


class Counting(LogitsProcessor):
    """Counts what was emitted, from the zeros that its states begin with."""

    name = "counting"

    def state_fields(self):
        return {"emitted": StateField(1, torch.int64), "most": StateField(1, torch.int64)}

    def admit(self, states, params, prompt):
        assert not any(state.any() for state in states.values())
        states["most"].fill_(params)

    def process(self, logits, nodes, states):
        return logits

    def note(self, states, tokens, lens):
        return {"emitted": states["emitted"] + lens[:, None]}


def test_a_rows_states_begin_at_zero_whoever_had_it():
    """What they noted, and a request that asked for something else in between."""
    states = OwnProcessors.alloc([Counting(), LastPenalty()], 3, 16, DEVICE)
    rows, tokens = torch.tensor([1, 2], device=DEVICE), torch.full((2, 3), 9, device=DEVICE)
    for asked in ({"counting": 4}, {"last": 2.0}, {}, {"counting": 3, "last": 1.0}) * 2:
        for row in (1, 2):
            states.admit(row, asked, [4, 5])
        found = {name: table[1:].tolist() for name, table in states.tables.items()}
        assert found["counting.most"] == [[asked.get("counting", 0)]] * 2
        assert found["counting.emitted"] == [[0]] * 2
        assert found["last.penalty"] == [[asked.get("last", 0.0)]] * 2
        assert found["asked"] == [["counting" in asked, "last" in asked]] * 2
        states.note(rows, tokens, torch.tensor([3, 2], dtype=torch.int32, device=DEVICE))
        emitted = states.tables["counting.emitted"][1:].tolist()
        assert emitted == ([[3], [2]] if "counting" in asked else [[0], [0]])


def test_the_logits_of_others_keep_their_bits():
    torch.manual_seed(0)
    states = OwnProcessors.alloc(own(), 4, 16, DEVICE)
    states.admit(2, {"last": 1.0}, [4, 5])
    states.admit(1, {}, [4, 5])
    decoder = engine("tree", processed=True).decoders[0]
    step = decoder.phases([0, 0, 0])
    tree = step.tree
    logits = torch.randn(3, tree.tokens.shape[1], 61, device=DEVICE)
    before = logits.clone()
    found = states.process(tree, logits, torch.tensor([1, 2, 0], device=DEVICE))
    assert torch.equal(found[[0, 2]], before[[0, 2]])
    assert not torch.equal(found[1], before[1])


def test_log_probabilities_are_those_of_what_was_processed():
    params = SamplingParams(logprobs=2, logprobs_of="processed", processors={"last": 5.0})
    (out,) = engine("tree").generate([Request(PROMPTS[0], 9, params)])
    target = TinyTarget(device=DEVICE)
    for at, (token, found) in enumerate(zip(out.tokens, out.logprobs, strict=True)):
        want = torch.tensor(scores(target, list(PROMPTS[0]), out.tokens[:at], params))
        assert found.value == pytest.approx(float(want.log_softmax(0)[token]), abs=1e-4)


class Returns(LogitsProcessor):
    """Returns logits and states as a function makes them of good ones."""

    name = "returns"

    def __init__(self, of_logits=lambda x: x, of_states=lambda x: x) -> None:
        self.of_logits, self.of_states = of_logits, of_states

    def state_fields(self):
        return {"count": StateField(2, torch.int64)}

    def process(self, logits, nodes, states):
        return self.of_logits(logits + 1)

    def note(self, states, tokens, lens):
        return self.of_states({"count": states["count"] + 1})


LOGITS = {
    "one node": (lambda x: x[:, :1], r"\[\d, 1, 61\] torch.float32 on "),
    "no nodes' axis": (lambda x: x[:, 0], r"\[\d, 61\] torch.float32 on "),
    "float64": (torch.Tensor.double, r"torch.float64 on "),
    "another device": (lambda x: x.to("meta"), "torch.float32 on meta"),
    "nothing": (lambda _: None, "None"),
}
NOTED = {
    "one number": (lambda x: {"count": x["count"][:, :1]}, r"\[\d, 1\] torch.int64 on "),
    "int32": (lambda x: {"count": x["count"].int()}, "torch.int32 on "),
    "a tensor": (lambda x: x["count"], "tensor"),
    "another field": (lambda x: {"total": x["count"]}, r"\['total'\]"),
    "nothing": (lambda _: None, "None"),
}


@pytest.mark.parametrize(("change", "got"), LOGITS.values(), ids=LOGITS)
def test_logits_of_another_kind_are_refused_by_the_processors_name(change, got):
    """Torch would take one node's for all, so a tree's texts would not be plain decoding's."""
    run = engine("tree", [Returns(change)])
    asks = Request([3, 4], 4, SamplingParams(processors={"returns": None}))
    where = r"^what 'returns' returns for logits must be \[\d, \d, 61\] torch.float32 on .*, got .*"
    with pytest.raises(ValueError, match=where + got):
        run.generate([asks])


@pytest.mark.parametrize(("change", "got"), NOTED.values(), ids=NOTED)
def test_states_of_another_kind_are_refused_by_the_processors_name(change, got):
    run = engine("tree", [Returns(of_states=change)])
    asks = Request([3, 4], 4, SamplingParams(processors={"returns": None}))
    with pytest.raises(ValueError, match=rf"^what 'returns' notes .*'count'.*, got .*{got}"):
        run.generate([asks])


@pytest.mark.parametrize(
    ("params", "prompt", "said"),
    [
        (
            SamplingParams(frequency_penalty=1.0),
            [3, 61],
            r"prompt tokens must be 0\.\.60, got 3\.\.61",
        ),
        (SamplingParams(logit_bias={61: 1.0}), [3], "tokens of logit_bias must be"),
        (SamplingParams(allowed_tokens=[-1, 3]), [3], "allowed_tokens must be"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused_on_the_host(params, prompt, said):
    states = ProcessorStates.alloc(3, 61, DEVICE)
    before = {name: one.clone() for name, one in states.tensors().items()}
    with pytest.raises(ValueError, match=said):
        states.admit(1, params, prompt)
    for name, one in states.tensors().items():
        assert torch.equal(one, before[name])


STRONG = partial(SamplingParams, 1.5, 3)


def drawn_p(models, params, processors) -> float:
    wanted = distribution_of(
        lambda out: scores(models[0], three_tokens.PROMPT, out, params), params
    )
    run = Engine(*models, three_tokens.SETTINGS["tree"], buckets=[250], processors=processors)
    return three_tokens.drawn_p_value(run, wanted, params=params)


def test_three_tokens_have_the_distribution_of_plain_decoding():
    """One that forgets the path fails the same test."""
    models = three_tokens.make_models()
    params = STRONG(logit_bias={14: 5.0, 4: 5.0, 17: 5.0}, processors={"last": 4.0})
    assert drawn_p(models, params, [LastPenalty()]) > 1e-3
    assert drawn_p(models, params, [ForgetsThePath()]) < 1e-12


def test_nothing_is_allocated_for_a_processor_that_nobody_asks_for():
    run = engine("tree")
    run.generate([Request(PROMPTS[0], 9)])
    assert all(decoder.processors is None for decoder in run.decoders)
    none = ProcessorStates.alloc(3, 61, DEVICE)
    assert not none.own
    assert none.tensors().keys() == ProcessorStates.alloc(2, 61, DEVICE).tensors().keys()


def test_a_graph_knows_the_states_addresses():
    run = engine("tree", processed=True, buckets=[2])
    (part,) = run.decoders[0].parts[Level.PROCESSED]
    launch = run.decoders[0].runner._captured[part][2].program
    table = run.decoders[0].processors.own["budget.left"]
    assert "processors.own.budget.left" in dict(launch.fingerprint())
    assert any(tensor is table for group in launch.holders() for tensor in group)


class Refused(LogitsProcessor):
    name = "last"

    def process(self, logits, nodes, states):
        raise AssertionError


def test_mistakes_are_named():
    run, prompt = engine("chain"), PROMPTS[0]
    with pytest.raises(ValueError, match=r"among the engine's \['last', .*, got \['other'\]"):
        run.add([Request(prompt, 9, SamplingParams(processors={"other": 1}))])
    with pytest.raises(ValueError, match="last must be a float, got 'much'"):
        run.add([Request(prompt, 9, SamplingParams(processors={"last": "much"}))])
    assert not run.running
    with pytest.raises(ValueError, match="processors must map names to parameters, got 'last'"):
        SamplingParams(processors="last")
    with pytest.raises(ValueError, match=r"different names, got \['last', 'last'\]"):
        engine("chain", [LastPenalty(), Refused()], processed=True)
    assert run.generate([Request(prompt, 4)])[0].finish_reason == "length"
    assert {Budget.name, NoNgram(2).name} == {"budget", "no 2-gram"}
