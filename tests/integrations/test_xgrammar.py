"""Grammars of xgrammar along trees, and texts of the shipped pair that match them."""

from __future__ import annotations

import copy
import json
import random
import re

import pytest
import torch

from specattn import Engine, Request, SamplingParams, SpecConfig
from specattn.models import HFTarget, load_draft
from tests.cli.command import PAIR
from tests.worlds import DEVICE

xgrammar = pytest.importorskip("xgrammar", reason="the extra `grammar` is not installed")

from specattn.integrations.xgrammar import XGrammarCompiler  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "tags", "n"],
}
PATTERN = r"(def|class) [a-z]{2,9}(\(\))?:"


@pytest.fixture(scope="module")
def pair():
    target = HFTarget.from_pretrained(PAIR / "target", dtype=torch.float32, device=DEVICE)
    head = load_draft(PAIR / "draft", target, dtype=torch.float32, device=DEVICE)
    return target.with_features(head.features), head


@pytest.fixture(scope="module")
def compiler(pair):
    return XGrammarCompiler(pair[0].tokenizer, pair[0])


def allowed(row, vocab):
    words = row.tolist()
    return {token for token in range(vocab) if words[token // 32] >> token % 32 & 1}


def poisoned(nodes, vocab):
    return torch.full((nodes, -(-vocab // 32)), -1, dtype=torch.int32)


def path_to(node, tokens, parents):
    """The tokens after the root down to a node."""
    return [*path_to(parents[node], tokens, parents), tokens[node]] if node > 0 else []


def after(grammar, text, vocab):
    """What a grammar allows after a text."""
    grammar.accept(text)
    row = poisoned(1, vocab)
    grammar.fill([0], [-1], row)
    return allowed(row[0], vocab)


def test_every_node_has_the_tokens_of_its_own_path(pair, compiler):
    """As a matcher that is told the path; nodes that do not match leave the others alone."""
    vocab, rng = pair[0].vocab_size, random.Random(4)
    make = compiler.regex(PATTERN)
    before = pair[0].tokenizer("def fo").input_ids
    grammar = make()
    grammar.accept(before)
    tokens, parents, matching = [before[-1]], [-1], [0]
    for node in range(1, 14):
        parent = rng.choice(matching)
        good = sorted(after(make(), [*before, *path_to(parent, tokens, parents)], vocab))
        bad = node % 3 == 0
        choice = [t for t in range(vocab) if t not in good] if bad else good
        tokens.append(rng.choice(choice))
        parents.append(parent)
        if not bad:
            matching.append(node)
    mask = poisoned(len(tokens), vocab)
    grammar.fill(tokens, parents, mask)
    assert len(matching) > 5
    for node in matching:
        want = after(make(), [*before, *path_to(node, tokens, parents)], vocab)
        assert allowed(mask[node], vocab) == want
    # it has noted nothing
    again = poisoned(len(tokens), vocab)
    grammar.fill(tokens, parents, again)
    assert again.equal(mask)


def test_a_text_that_matches_can_only_end_and_then_go_on_freely(pair, compiler):
    target = pair[0]
    grammar, (end,) = compiler.regex("ab")(), target.eos_token_ids
    grammar.accept(target.tokenizer("ab").input_ids)
    mask = poisoned(2, target.vocab_size)
    grammar.fill([0, end], [-1, 0], mask)
    assert allowed(mask[0], target.vocab_size) == {end}
    assert (mask[1] == -1).all()
    grammar.accept([end, 5])
    mask = poisoned(1, target.vocab_size)
    grammar.fill([5], [-1], mask)
    assert (mask == -1).all()


@pytest.mark.parametrize("shape", [(0, 1, 1), (3, 4, 12)], ids=str)
def test_texts_match_beside_one_that_is_free(pair, compiler, shape):
    target = pair[0]
    run = Engine(*pair, SpecConfig(*shape, 256, 5), buckets=(5,))
    drawn = SamplingParams(temperature=1.0, seed=3)
    prompt = target.tokenizer("# one line\n").input_ids
    asked = [
        Request(prompt, 90, grammar=compiler.json_schema(SCHEMA)),
        Request(prompt, 90, drawn, grammar=compiler.json_schema(json.dumps(SCHEMA))),
        Request(prompt, 90, drawn, grammar=compiler.regex(PATTERN)),
        Request(
            prompt, 90, SamplingParams(repetition_penalty=1.2), grammar=compiler.regex(PATTERN)
        ),
        Request(prompt, 30),
    ]
    outs = run.generate(asked)
    texts = [target.tokenizer.decode(out.tokens, skip_special_tokens=True) for out in outs]
    assert [out.finish_reason for out in outs[:4]] == ["eos"] * 4
    for text in texts[:2]:
        found = json.loads(text)
        assert set(found) == set(SCHEMA["required"])
        assert len(found["name"]) <= 8
        assert 0 <= found["n"] <= 999
        assert set(found["tags"]) <= {"a", "bc"}
    for text in texts[2:4]:
        assert re.fullmatch(PATTERN, text)
    (free,) = run.generate([asked[4]])
    assert outs[4].tokens == free.tokens


@pytest.mark.parametrize("asked", [("json_schema", {"type": "no"}), ("regex", "a(")])
def test_what_does_not_compile_is_refused(compiler, asked):
    method, value = asked
    name = {"json_schema": "schema", "regex": "pattern"}[method]
    with pytest.raises(ValueError, match=f"^{name} must be one that xgrammar compiles: [A-Z]"):
        getattr(compiler, method)(value)


def test_a_target_without_an_end_is_refused(pair):
    endless = copy.copy(pair[0])
    vars(endless)["eos_token_ids"] = frozenset()
    tokenizer = copy.deepcopy(pair[0].tokenizer)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="needs a target with an end-of-text token"):
        XGrammarCompiler(tokenizer, endless)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.whole)])
@pytest.mark.parametrize("kind", ["schema", "pattern"])
def test_drawn_texts_always_match(pair, compiler, kind, part):
    """Twenty at a time; all end of themselves."""
    target, draft = pair
    run = Engine(target, draft, SpecConfig(3, 2, 8, 256, 20), buckets=(20,))
    grammar = compiler.json_schema(SCHEMA) if kind == "schema" else compiler.regex(PATTERN)
    prompts = [target.tokenizer(text).input_ids for text in ("#", "def f", "value = ", "\n\n")]
    requests = [
        Request(
            prompts[at % 4],
            200,
            SamplingParams(temperature=(0.7, 1.0, 1.5)[at % 3], seed=100 * part + at),
            grammar=grammar,
        )
        for at in range(20)
    ]
    outs = run.generate(requests)
    assert {out.finish_reason for out in outs} == {"eos"}
    texts = [target.tokenizer.decode(out.tokens, skip_special_tokens=True) for out in outs]
    assert len(set(texts)) > 10
    for text in texts:
        if kind == "pattern":
            assert re.fullmatch(PATTERN, text)
            continue
        found = json.loads(text)
        assert set(found) == set(SCHEMA["required"])
        assert isinstance(found["name"], str)
        assert len(found["name"]) <= 8
        assert isinstance(found["n"], int)
        assert 0 <= found["n"] <= 999
        assert set(found["tags"]) <= {"a", "bc"}
        assert len(found["tags"]) <= 3
    assert max(n for out in outs for n in out.accept_lens) > 1


def test_a_text_may_end_by_the_tokenizers_own_token(pair):
    """The only end, where the target has none."""
    tokenizer = copy.deepcopy(pair[0].tokenizer)
    tokenizer.eos_token = tokenizer.decode([300])
    target = copy.copy(pair[0])
    vars(target)["eos_token_ids"] = frozenset()
    make = XGrammarCompiler(tokenizer, target).regex("(yes|no)")
    engine = Engine(target, None, SpecConfig(0, 1, 1, 64, 1), tokenizer=tokenizer, graphs=False)
    (out,) = engine.generate([Request("# json: ", 20, grammar=make)])
    assert (out.tokens[-1], out.finish_reason) == (300, "eos")
    assert out.text in ("yes", "no")
