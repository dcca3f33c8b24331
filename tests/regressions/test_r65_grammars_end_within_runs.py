"""R65: openvinotoolkit/openvino.genai#4081, sglang#21723, sglang#13019, sglang#9187, sglang#25388.

The end of a grammar within an accepted run was not seen: a matcher that had ended was asked for the
next mask, which crashed, or texts went on behind their end, with characters doubled.

A text ends with its grammar, wherever in a run that is, and no grammar that has ended is asked
again. JSON is that of plain decoding under the same grammar, whatever drafts.
"""

from __future__ import annotations

import json

import pytest
import torch

from specattn import Engine, Request, SamplingParams, SpecConfig
from specattn.models import HFTarget, load_dflash, load_draft
from specattn.models.hub import PAIR, PAIR_HEADS
from specattn.speculative.proposers.lookup import LookupProposer
from tests.regressions.known import Known
from tests.regressions.masks import leave
from tests.samples import half, on_cpu
from tests.tiny import TinyDraft, TinyTarget
from tests.worlds import DEVICE

LOWER, END, LONGEST = range(30), 60, 12
PROMPT = [3, 14, 15, 9]
JSON_PROMPT = 'print([false, "abc", [12, 12], {"name": "x", "ok": true}])\n'
SCHEMAS = [
    {"type": "boolean"},
    {"enum": ["a", "abc", 'a"b']},
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
    },
]


class Ending:
    """So many tokens of the lower half, then the end; afterwards it may not be asked."""

    def __init__(self, count: int) -> None:
        self.left, self.ended = count, False

    def fill(self, tokens, parents, bitmask) -> None:
        assert not self.ended, "it has ended"
        left = [self.left]
        for node, parent in enumerate(parents):
            if node:
                left.append(left[parent] - 1)
            # behind the end nothing is asked
            if left[node] >= 0:
                leave(bitmask[node], [END] if left[node] == 0 else LOWER)

    def accept(self, tokens) -> None:
        for token in tokens:
            assert not self.ended, "it has ended"
            assert token == END if self.left == 0 else token in LOWER
            self.left, self.ended = self.left - 1, token == END


@on_cpu(half, "shape", "drawn")
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("shape", [(16, 1, 17), (3, 1, 4), (3, 3, 9)], ids=str)
def test_a_grammar_that_has_ended_is_not_asked(shape, drawn):
    """Lengths of 1 to 12 end runs at every place."""
    target = TinyTarget(device=DEVICE)
    target.eos_token_ids = frozenset([END])
    counts = range(1, LONGEST + 1)
    requests = [
        Request(
            [count, *PROMPT],
            40,
            SamplingParams(float(drawn), seed=count),
            grammar=lambda count=count: Ending(count),
        )
        for count in counts
    ]
    plain = Engine(target, None, SpecConfig(0, 1, 1, 64, LONGEST), buckets=[LONGEST])
    want = plain.generate(requests)
    draft = TinyDraft(device=DEVICE)
    if shape[0] == 16:
        # the end, and as much behind it as a run holds
        pairs = zip(requests, want, strict=True)
        draft = Known([*request.prompt, *one.tokens, *[7] * 16] for request, one in pairs)
    run = Engine(target, draft, SpecConfig(*shape, 64, LONGEST), buckets=[LONGEST])
    outs = run.generate(requests)
    for count, out in zip(counts, outs, strict=True):
        assert len(out.tokens) == count + 1
        assert out.tokens[-1] == END
        assert out.finish_reason == "eos"
    if not drawn:
        assert [out.tokens for out in outs] == [out.tokens for out in want]
    assert max(n for out in outs for n in out.accept_lens) > 1


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return HFTarget.from_pretrained(PAIR / "target", dtype=torch.float32, device=DEVICE)


@pytest.fixture(scope="module")
def plain(target):
    """Requests for JSON, and what plain decoding writes for them."""
    pytest.importorskip("xgrammar", reason="the extra `grammar` is not installed")
    from specattn.integrations.xgrammar import XGrammarCompiler

    compiler = XGrammarCompiler(target.tokenizer, target)
    prompt = target.tokenizer(JSON_PROMPT).input_ids
    requests = [Request(prompt, 40, grammar=compiler.json_schema(schema)) for schema in SCHEMAS]
    run = Engine(target, None, SpecConfig(0, 1, 1, 128, 4), buckets=[4])
    return requests, run.generate(requests)


def head(load, kind: str):
    def make(target):
        draft = load(PAIR_HEADS[kind], target, dtype=torch.float32, device=DEVICE)
        return target.with_features(draft.features), draft

    return make


DRAFTS = {
    "chain": (head(load_draft, "eagle3"), SpecConfig(5, 1, 6, 128, 4)),
    "beams": (head(load_draft, "eagle3"), SpecConfig(4, 4, 16, 128, 4)),
    "best first": (head(load_dflash, "dflash"), SpecConfig(7, 1, 16, 128, 4, tree="best_first")),
    "lookup": (lambda target: (target, LookupProposer(1)), SpecConfig(5, 2, 11, 128, 4)),
    "known": (None, SpecConfig(16, 1, 17, 128, 4)),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_json_is_that_of_plain_decoding(target, plain, name):
    requests, want = plain
    make, config = DRAFTS[name]
    if make is None:
        # what was written, and more of it behind its end
        texts = ([*ask.prompt, *one.tokens * 4] for ask, one in zip(*plain, strict=True))
        models = target, Known(sorted(texts, key=len))
    else:
        models = make(target)
    outs = Engine(*models, config, buckets=[4]).generate(requests)
    assert [out.tokens for out in outs] == [out.tokens for out in want]
    assert {out.finish_reason for out in outs} == {"eos"}
    for out in outs:
        json.loads(target.tokenizer.decode(out.tokens, skip_special_tokens=True))
    assert max(n for out in outs for n in out.accept_lens) > 2
