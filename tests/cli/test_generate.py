"""What `specattn generate` writes, for trees and batches of any shape."""

from __future__ import annotations

import json
import re

import pytest

from specattn.cli.loading import decode
from tests.cli.command import COUNT, OTHERS, PROMPT, generate, generated, plain_tokens, tokenizer


def test_text_is_what_transformers_generates():
    result = generate(PROMPT)
    want = decode(tokenizer(), plain_tokens(PROMPT, COUNT))
    assert result.stdout == want + ("" if want.endswith("\n") else "\n")
    assert "accepted/step" in result.stderr
    assert re.search(r"step +torch_native", result.stderr)


def test_json_is_one_object_and_nothing_else():
    result = generate("--json", PROMPT)
    found = json.loads(result.stdout)
    assert found["tokens"] == plain_tokens(PROMPT, COUNT)
    assert found["text"] == decode(tokenizer(), found["tokens"])
    assert found["num_tokens"] == COUNT
    assert found["finish_reason"] == "length"
    assert found["backend"] == "torch_native"
    assert found["accepted_per_step"] > 2
    # the first token is the prompt's; those past the last one do not count
    assert found["accepted_per_step"] * found["steps"] == pytest.approx(COUNT - 1)
    assert found["steps"] < COUNT / 2
    assert 0 < found["time_to_first_token"] < COUNT / found["tokens_per_second"]
    graphs = found["graphs"]
    assert graphs["replayed"] == graphs["fallbacks"] == 0
    assert graphs["unrecorded"] >= found["steps"]
    assert set(graphs["modes"]) == {"step"}
    assert found["fused"] == ["target", "draft"]
    assert "identical" not in found
    assert result.stderr == ""


def test_the_modules_of_transformers_generate_the_same():
    found = generated("--no-fused", PROMPT)
    # a head has no others
    assert (found["fused"], found["tokens"]) == (["draft"], plain_tokens(PROMPT, COUNT))
    assert generated("--steps", "0", PROMPT)["fused"] == ["target"]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (["--steps", "0"], COUNT - 1),
        (["--draft-tokens", "1"], COUNT - 1),
        (["--draft-tokens", "4"], None),
        (["--topk", "2", "--steps", "1"], None),
        (["--topk", "4"], None),
        # so cold that greedy tokens are drawn
        (["--draft-sampling", "--steps", "3", "--temperature", "1e-5"], None),
        (["--topk", "8", "--steps", "3", "--draft-tokens", "20", "--page-size", "16"], None),
    ],
)
def test_every_shape_generates_the_same(options, steps):
    found = generated(*options, PROMPT)
    assert found["tokens"] == plain_tokens(PROMPT, COUNT)
    assert steps is None or found["steps"] == steps


@pytest.mark.parametrize(
    "options",
    [
        ["--topk", "4", "--steps", "3", "--adaptive"],
        ["--steps", "4", "--adaptive"],
        ["--cudagraph", "piecewise"],
    ],
    ids=" ".join,
)
def test_steps_of_any_kind_generate_the_same(options):
    found = generated(*options, PROMPT)
    assert found["tokens"] == plain_tokens(PROMPT, COUNT)
    if "--cudagraph" in options:
        assert set(found["graphs"]["modes"]) == {"draft_decode", "target_verify", "draft_extend"}
    else:
        assert len(found["configs"]) == 3 + ("--topk" in options)
        assert sum(one["steps"] for one in found["configs"]) == found["steps"]
        # which config is the best one is measured
        assert max(one["accepted_per_step"] for one in found["configs"]) > 1


def test_the_table_says_how_often_each_config_was_used():
    result = generate("--adaptive", "--compare", "--steps", "3", PROMPT, count=12)
    assert re.search(r"depth +topk +nodes +steps +accepted/step *$", result.stderr, re.MULTILINE)
    assert re.search(r"^ *3 +1 +4 +\d", result.stderr, re.MULTILINE)
    assert "identical to plain decoding: 12 tokens" in result.stderr


@pytest.mark.parametrize("count", [12, 13, 14])
def test_configs_count_the_run_without_its_warm_up(count):
    """Nor is a step counted that was on its way when the text ended."""
    found = generated("--adaptive", "--compare", "--steps", "3", PROMPT, count=count)
    steps = [one["steps"] for one in found["configs"]]
    gained = sum(one["steps"] * one["accepted_per_step"] for one in found["configs"])
    assert sum(steps) == found["steps"]
    assert gained == pytest.approx(found["steps"] * found["accepted_per_step"])
    for one in found["configs"]:
        assert (one["accepted_per_step"] >= 1) == (one["steps"] > 0)


def test_prompts_come_from_standard_input():
    want = generate(PROMPT).stdout
    assert generate("-", stdin=PROMPT).stdout == want
    assert generate(stdin=PROMPT + "\n").stdout == want


def test_prompts_come_from_lines_and_are_shown_in_their_order(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\ufeffdef read_config(path):\r\nimport os\n\n", encoding="utf-8")
    want = [generate(text, count=8).stdout for text in ("def read_config(path):", "import os")]
    for size in ("1", "2"):
        result = generate("--prompts", str(file), "--batch-size", size, count=8)
        assert result.stdout == f"==> 1 <==\n{want[0]}\n==> 2 <==\n{want[1]}"
        assert "all 2" in result.stderr
    (only,) = generated("--prompts", "-", stdin="import os\n", count=8)
    assert only["tokens"] == plain_tokens("import os", 8)


def test_prompts_come_from_json_lines(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('\ufeff{"prompt": "import os\\n", "id": 3}\r\n\n"def f(x):"\n')
    found = generated("--prompts", str(file), count=8)
    assert [one["tokens"] for one in found] == [
        plain_tokens(text, 8) for text in ("import os\n", "def f(x):")
    ]


def test_the_same_seed_gives_the_same_tokens_in_any_batch(tmp_path):
    sampled = ["--temperature", "1", "--top-p", "0.9", "--top-k", "50"]

    def drawn(*args: str):
        return generated(*sampled, "--seed", *args, count=14)

    alone = drawn("7", PROMPT)["tokens"]
    assert alone == drawn("7", PROMPT)["tokens"]
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([OTHERS[1], PROMPT]))
    assert alone == drawn("6", "--prompts", str(file))[1]["tokens"]


def test_each_prompt_of_a_batch_has_the_next_seed(tmp_path):
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([PROMPT] * 3))

    def drawn(seed: int, *args: str):
        return generated("--temperature", "1", "--seed", str(seed), *args, count=14)

    batch = [one["tokens"] for one in drawn(2**63 - 2, "--prompts", str(file))]
    # they go on from the smallest after the largest of 64 bits
    alone = [drawn(seed, PROMPT)["tokens"] for seed in (2**63 - 2, 2**63 - 1, -(2**63))]
    assert batch == alone
    assert len(set(map(tuple, batch))) == 3


def test_a_stop_string_ends_the_text_before_it():
    whole = generated(PROMPT, count=40)["text"]
    found = generated(PROMPT, "--stop", "self.y", "--stop", "no such text", count=40)
    assert "self.y" in whole
    assert found["text"] == whole[: whole.index("self.y")]
    assert found["finish_reason"] == "stop"
    assert generate(PROMPT, "--stop", "self.y", count=40).stdout == found["text"] + "\n"


def test_the_context_ends_the_text():
    used = len(tokenizer()(PROMPT).input_ids)
    found = generated(PROMPT, "--max-context", str(used + 10), count=40)
    assert found["finish_reason"] == "context"
    assert found["tokens"] == plain_tokens(PROMPT, 40)[: found["num_tokens"]]
    assert 10 <= found["num_tokens"] <= 11


def test_the_environment_names_the_backend():
    found = generated(PROMPT, count=2, env={"SPECATTN_BACKEND": "torch_native"})
    assert found["backend"] == "torch_native"


@pytest.mark.parametrize(
    "options",
    [
        ("--draft-kind", "dflash"),
        ("--draft-kind", "dflash", "--tree", "best_first", "--draft-tokens", "24", "--ranks", "4"),
        ("--draft-kind", "dflash", "--topk", "2", "--steps", "3", "--no-fused"),
        ("--tree", "best_first"),
        ("--draft-kind", "lookup", "--topk", "3"),
        ("--draft-kind", "none"),
    ],
    ids=" ".join,
)
def test_every_kind_of_draft_has_the_tokens_of_plain_decoding(options):
    found = json.loads(generate(PROMPT, "--json", *options, count=40).stdout)
    assert found["tokens"] == plain_tokens(PROMPT, 40)
    drafts = options[-1] != "none"
    # the first token is the prompt's
    assert (found["steps"] < 39) == drafts
