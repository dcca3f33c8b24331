"""What a request may ask for, on the command line: penalties, samples, log-probabilities."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec

import pytest
import torch

from tests.cli.command import (
    ON_CPU,
    OTHERS,
    PROMPT,
    generate,
    generated,
    plain_model,
    plain_tokens,
    run,
    tokenizer,
)

needs_xgrammar = pytest.mark.skipif(
    find_spec("xgrammar") is None, reason="the extra `grammar` is not installed"
)


def test_a_repetition_penalty_is_that_of_transformers():
    ids = tokenizer()(PROMPT, return_tensors="pt").input_ids
    out = plain_model().generate(
        ids, max_new_tokens=24, do_sample=False, pad_token_id=0, repetition_penalty=1.3
    )
    found = generated("--repetition-penalty", "1.3", PROMPT)
    assert found["tokens"] == out[0, ids.shape[1] :].tolist()
    assert found["tokens"] != plain_tokens(PROMPT, 24)


@pytest.mark.parametrize("option", ["--presence-penalty", "--frequency-penalty"])
def test_penalties_are_those_of_plain_decoding(option):
    found = generated(option, "1.5", "--topk", "2", "--compare", PROMPT)
    assert found["identical"] is True
    assert found["tokens"] != plain_tokens(PROMPT, 24)
    repeats = [
        len(tokens) - len(set(tokens)) for tokens in (found["tokens"], plain_tokens(PROMPT, 24))
    ]
    assert repeats[0] < repeats[1]


def test_min_p_leaves_what_is_probable():
    """Of 1, the most probable token alone."""
    found = generated("--temperature", "2", "--min-p", "1", PROMPT)
    assert found["tokens"] == plain_tokens(PROMPT, 24)
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


@pytest.mark.parametrize("options", [["--topk", "4"], ["--steps", "0"], ["--temperature", "1"]])
def test_logprobs_are_those_of_transformers(options):
    found = generated("--logprobs", "3", *options, PROMPT)
    ids = tokenizer()(PROMPT).input_ids
    text = torch.tensor([ids + found["tokens"]])
    with torch.no_grad():
        laws = plain_model()(text).logits[0, len(ids) - 1 : -1].log_softmax(1)
    assert [one["token"] for one in found["logprobs"]] == found["tokens"]
    for one, law in zip(found["logprobs"], laws, strict=True):
        assert one["text"] == tokenizer().decode([one["token"]])
        assert one["logprob"] == pytest.approx(float(law[one["token"]]), abs=2e-5)
        best = law.topk(3)
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
@pytest.mark.parametrize("options", [["--topk", "4"], ["--temperature", "1", "--n", "3"]])
def test_a_text_matches_a_schema(tmp_path, options):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer"}},
        "required": ["name", "n"],
    }
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    for given in (str(file), f" {json.dumps(schema)}"):
        found = generated("--json-schema", given, "--logprobs", "1", *options, PROMPT, count=70)
        for one in found if "--n" in options else [found]:
            assert one["finish_reason"] == "eos"
            value = json.loads(one["text"])
            assert set(value) == {"name", "n"}
            assert isinstance(value["n"], int)
            assert len(one["logprobs"]) == one["num_tokens"]


@needs_xgrammar
def test_a_schema_that_does_not_compile():
    result = run("generate", *ON_CPU, "--json-schema", '{"type": "no"}', "p")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "specattn: error: --json-schema: must be one that xgrammar compiles: "
        'Unsupported type "no"\n'
    )


@needs_xgrammar
def test_a_schema_writes_what_plain_decoding_writes():
    schema = '{"type": "array", "items": {"enum": ["x", "self"]}, "maxItems": 6}'
    found = generated("--json-schema", schema, "--topk", "2", "--compare", PROMPT, count=40)
    assert found["identical"] is True
    assert set(json.loads(found["text"])) <= {"x", "self"}
