"""`specattn generate --compare`: plain decoding beside, and the first difference."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from specattn.cli.compare import compare_plain
from specattn.cli.running import Outcome, Setup
from specattn.config import SpecConfig
from specattn.engine.engine import Request, RequestOutput
from tests.cli.command import (
    COUNT,
    OTHERS,
    PAIR,
    PROMPT,
    generate,
    generated,
    loaded,
    plain_tokens,
    tokenizer,
)


def test_compare_with_a_batch_of_different_lengths(tmp_path):
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([PROMPT, *OTHERS]))
    options = "--compare", "--topk", "2", "--batch-size", "3"
    found = generated("--prompts", str(file), *options, count=12)
    assert len(found) == 4
    for prompt, one in zip([PROMPT, *OTHERS], found, strict=True):
        assert one["tokens"] == plain_tokens(prompt, 12)
        assert one["identical"] is True
        assert one["first_difference"] is None
        assert one["speed_up"] > 0
        assert one["plain"]["tokens"] == one["tokens"]
        assert one["plain"]["steps"] == 11


def test_compare_says_so_in_the_table():
    result = generate("--compare", "--topk", "2", PROMPT)
    assert f"identical to plain decoding: {COUNT} tokens; " in result.stderr
    assert "x as fast (" in result.stderr


@pytest.mark.parametrize("shape", [[], ["--topk", "4"]], ids=["chain", "tree"])
def test_compare_over_a_float8_cache(shape):
    """Both read what was rounded; a key that rounds the other way can tip a near tie."""
    found = generated("--kv-cache-dtype", "fp8_e4m3", "--compare", *shape, PROMPT)
    assert found["backend"] == "torch_native"
    if not found["identical"]:
        assert found["first_difference"]["plain_margin"] < 0.02, found["first_difference"]


def test_compare_of_sampled_tokens_compares_no_tokens():
    found = generated("--compare", "--temperature", "0.8", PROMPT, count=8)
    assert found["identical"] is None
    assert found["first_difference"] is None
    assert found["speed_up"] > 0
    shown = generate("--compare", "--temperature", "1", PROMPT, count=8)
    assert "the same distribution" in shown.stderr


def test_a_difference_is_found_with_its_margin():
    models = loaded(None, None, speculative=True, dtype=torch.float32, device=torch.device("cpu"))
    prompts = [tokenizer()(text).input_ids for text in (PROMPT, OTHERS[0])]
    requests = tuple(Request(ids, max_new_tokens=12) for ids in prompts)
    setup = Setup(models, requests, 128, 2, {"backend": "torch_native", "graphs": False})
    ours = [plain_tokens(PROMPT, 12), plain_tokens(OTHERS[0], 12)]
    changed = [*ours[1][:7], ours[1][7] + 1, *ours[1][8:]]
    outcome = Outcome((RequestOutput(ours[0]), RequestOutput(changed)), 1.0, ())
    found = compare_plain(outcome, setup, SpecConfig(), lambda index, tokens: None)
    assert found.differences[0] is None
    assert found.first is not None
    assert (found.first.request, found.first.position) == (1, 7)
    assert (found.first.token, found.first.plain_token) == (ours[1][7] + 1, ours[1][7])
    with torch.no_grad():
        ids = torch.tensor([prompts[1] + ours[1][:7]])
        reference = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
        best, second = reference(ids).logits[0, -1].topk(2).values.tolist()
    assert found.first.plain_margin == pytest.approx(best - second, abs=1e-3)
    cut = Outcome((RequestOutput(ours[0]), RequestOutput(ours[1][:5])), 1.0, ())
    shorter = compare_plain(cut, setup, SpecConfig(), lambda index, tokens: None).first
    assert shorter is not None
    assert (shorter.position, shorter.token, shorter.plain_token) == (5, None, ours[1][5])


@pytest.mark.parametrize("tree", [(0, 1, 1), (3, 2, 6)], ids=["plain", "tree"])
def test_a_warm_up_decodes_two_steps_of_a_full_batch_and_ends_its_requests(tree):
    """What is measured after it compiles nothing: prompts alone would leave steps to compile."""
    models = loaded(None, None, speculative=True, dtype=torch.float32, device=torch.device("cpu"))
    requests = (Request(list(range(5, 60)), 4), Request([7, 8, 9], 4), Request([3], 4))
    setup = Setup(
        models, requests, 128, 2, {"backend": "torch_native", "graphs": False}, warm_up=True
    )
    config = SpecConfig(*tree, 128, 2)
    run = setup.engine(config)
    setup.prepare(run)
    decoder = run.decoder(run.config)
    assert sum(decoder.runner.stats.replays.values()) >= 2
    assert run.num_running == 0
    assert run.table.num_free_rows == 2
