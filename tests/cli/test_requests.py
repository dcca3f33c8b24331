"""What a request may ask for, on the command line: penalties, samples, log-probabilities."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec

import pytest
import torch

from specattn.cli.loading import decode
from tests.cli.command import (
    COUNT,
    ON_CPU,
    OTHERS,
    PROMPT,
    generate,
    generated,
    plain_model,
    plain_tokens,
    refused,
    tokenizer,
)
from tests.samples import half, sampled

needs_xgrammar = pytest.mark.skipif(
    find_spec("xgrammar") is None, reason="the extra `grammar` is not installed"
)


def test_a_repetition_penalty_is_that_of_transformers():
    ids = tokenizer()(PROMPT, return_tensors="pt").input_ids
    out = plain_model().generate(
        ids, max_new_tokens=COUNT, do_sample=False, pad_token_id=0, repetition_penalty=1.3
    )
    found = generated("--repetition-penalty", "1.3", PROMPT)
    assert found["tokens"] == out[0, ids.shape[1] :].tolist()
    assert found["tokens"] != plain_tokens(PROMPT, COUNT)


@pytest.mark.parametrize("option", ["--presence-penalty", "--frequency-penalty"])
def test_penalties_are_those_of_plain_decoding(option):
    found = generated(option, "1.5", "--topk", "2", "--compare", PROMPT)
    assert found["identical"] is True
    assert found["tokens"] != plain_tokens(PROMPT, COUNT)
    repeats = [
        len(tokens) - len(set(tokens)) for tokens in (found["tokens"], plain_tokens(PROMPT, COUNT))
    ]
    assert repeats[0] < repeats[1]


def test_min_p_leaves_what_is_probable():
    """Of 1, the most probable token alone."""
    found = generated("--temperature", "2", "--min-p", "1", PROMPT)
    assert found["tokens"] == plain_tokens(PROMPT, COUNT)
    assert generated("--temperature", "2", PROMPT)["tokens"] != found["tokens"]


def test_samples_are_texts_of_consecutive_seeds(tmp_path):
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([PROMPT, OTHERS[1]]))
    drawn = ["--temperature", "1"]
    batch = generated(*drawn, "--seed", "3", "--n", "2", "--prompts", str(file), count=10)
    alone = [
        generated(*drawn, "--seed", str(3 + at), text, count=10)["tokens"]
        for at, text in enumerate((PROMPT, PROMPT, OTHERS[1], OTHERS[1]))
    ]
    assert [one["tokens"] for one in batch] == alone
    result = generate(*drawn, "--seed", "3", "--n", "2", PROMPT, count=10)
    assert re.findall(r"==> (.*) <==", result.stdout) == ["1.1", "1.2"]
    assert re.search(r"^1\.2 +10 ", result.stderr, re.MULTILINE)


def test_samples_go_on_from_the_smallest_seed():
    drawn = ["--temperature", "1"]
    found = generated(*drawn, "--seed", str(2**63 - 1), "--n", "2", PROMPT, count=10)
    alone = [
        generated(*drawn, "--seed", str(seed), PROMPT, count=10) for seed in (2**63 - 1, -(2**63))
    ]
    assert [one["tokens"] for one in found] == [one["tokens"] for one in alone]


@pytest.mark.parametrize("options", [["--topk", "4"], ["--steps", "0"]], ids=["tree", "plain"])
def test_a_bias_is_added_to_logits(options):
    """The second best token comes first where it outweighs the lead of the best."""
    first = generated("--logprobs", "3", PROMPT, count=1)["logprobs"][0]["top"]
    best, second, third = (one["token"] for one in first)
    gap = first[0]["logprob"] - first[1]["logprob"]
    for more, want in ((0.01, second), (-0.01, best)):
        bias = [f"--logit-bias={second}={gap + more}", f"--logit-bias={third}=0"]
        assert generated(*bias, *options, PROMPT, count=1)["tokens"] == [want]
    found = generated(f"--logit-bias={best}=-100", *options, "--compare", PROMPT)
    assert best not in found["tokens"]
    assert found["identical"] is True


def test_bad_words_are_not_in_the_text():
    words = ["self", "x"]
    plain = decode(tokenizer(), plain_tokens(PROMPT, COUNT))
    options = [f"--bad-words={word}" for word in words]
    found = generated(*options, "--topk", "2", "--compare", PROMPT)
    assert found["identical"] is True
    spelled = [tokenizer()(space + word).input_ids for word in words for space in ("", " ")]
    for ids in spelled:
        assert ids not in [found["tokens"][at : at + len(ids)] for at in range(COUNT)]
    assert any(word in plain for word in words)


def test_ends_wait_for_the_fewest_tokens():
    tokens = plain_tokens(PROMPT, COUNT)
    end = tokens[4]
    stop = ["--stop-token-id", str(end), "--stop-token-id", "0"]
    found = generated(*stop, PROMPT)
    at = tokens.index(end) + 1
    assert (found["tokens"], found["finish_reason"]) == (tokens[:at], "stop")
    found = generated(*stop, "--min-new-tokens", "12", "--compare", PROMPT)
    assert found["num_tokens"] > 12
    assert end not in found["tokens"][:11]
    assert found["identical"] is True


def test_a_stop_string_waits_for_the_fewest_tokens():
    found = generated("--stop", "self.x", "--min-new-tokens", "12", PROMPT, count=40)
    whole = decode(tokenizer(), found["tokens"])
    assert found["finish_reason"] == "stop"
    assert whole.count("self.x") == 2
    assert found["text"] == whole[: whole.rindex("self.x")]


@pytest.mark.parametrize("options", [["--topk", "4"], ["--steps", "0"], ["--temperature", "1"]])
def test_logprobs_are_those_of_transformers(options):
    found = generated("--logprobs", "3", *options, PROMPT)
    ids = tokenizer()(PROMPT).input_ids
    text = torch.tensor([ids + found["tokens"]])
    with torch.no_grad():
        logprobs = plain_model()(text).logits[0, len(ids) - 1 : -1].log_softmax(1)
    assert [one["token"] for one in found["logprobs"]] == found["tokens"]
    for one, scores in zip(found["logprobs"], logprobs, strict=True):
        assert one["text"] == tokenizer().decode([one["token"]])
        assert one["logprob"] == pytest.approx(float(scores[one["token"]]), abs=2e-5)
        best = scores.topk(3)
        assert [top["token"] for top in one["top"]] == best.indices.tolist()
        values = [top["logprob"] for top in one["top"]]
        assert values == pytest.approx(best.values.tolist(), abs=2e-5)
        assert one["top"][0]["text"] == tokenizer().decode([one["top"][0]["token"]])


def test_a_table_shows_the_first_logprobs():
    shown = generate("--logprobs", "1", PROMPT, count=30).stderr
    first = tokenizer().decode(plain_tokens(PROMPT, 1))
    assert re.search(rf"^1 +{re.escape(repr(first))} +-\d\.\d\d +", shown, re.MULTILINE)
    assert "and 6 more, which --json has\n" in shown
    assert "logprob" not in generate(PROMPT).stderr


@needs_xgrammar
@sampled(
    half,
    options=[["--topk", "4"], ["--temperature", "1", "--n", "3"]],
    given=["in a file", "by itself"],
)
def test_a_text_matches_a_schema(tmp_path, options, given):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer"}},
        "required": ["name", "n"],
    }
    wanted = f" {json.dumps(schema)}"
    if given == "in a file":
        (tmp_path / "schema.json").write_text(wanted)
        wanted = str(tmp_path / "schema.json")
    found = generated("--json-schema", wanted, "--logprobs", "1", *options, PROMPT, count=70)
    for one in found if "--n" in options else [found]:
        assert one["finish_reason"] == "eos"
        value = json.loads(one["text"])
        assert set(value) == {"name", "n"}
        assert isinstance(value["n"], int)
        assert len(one["logprobs"]) == one["num_tokens"]


@needs_xgrammar
@pytest.mark.parametrize("options", [["--topk", "4"], ["--temperature", "1", "--n", "3"]])
def test_a_text_matches_a_regular_expression(options):
    pattern = r"\(self, [a-z]{2,5}\) -> (int|str):"
    found = generated("--regex", pattern, *options, PROMPT, count=40)
    for one in found if "--n" in options else [found]:
        assert one["finish_reason"] == "eos"
        assert re.fullmatch(pattern, one["text"])


@needs_xgrammar
def test_a_regular_expression_that_does_not_compile():
    told = refused("generate", *ON_CPU, "--regex", "(", "p")
    assert told.startswith("--regex: must be one that xgrammar compiles:")


@needs_xgrammar
def test_a_schema_that_does_not_compile():
    line = '--json-schema: must be one that xgrammar compiles: Unsupported type "no"'
    assert refused("generate", *ON_CPU, "--json-schema", '{"type": "no"}', "p") == line


@needs_xgrammar
def test_a_schema_writes_what_plain_decoding_writes():
    schema = '{"type": "array", "items": {"enum": ["x", "self"]}, "maxItems": 6}'
    found = generated("--json-schema", schema, "--topk", "2", "--compare", PROMPT, count=40)
    assert found["identical"] is True
    assert set(json.loads(found["text"])) <= {"x", "self"}
