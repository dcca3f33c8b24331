"""What shares of rows gain, from recorded trees: as an engine gains it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from bench import verify_len
from bench.acceptance import held_out_prompts
from bench.shipped import pair
from bench.step_blocks import BlockSetting
from bench.step_oracle import check
from bench.step_timing import Stepper, check_advance
from bench.verify_len import SharedSetting, Text
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from tests.bench.test_step_blocks import world

SHARED = SharedSetting(1, 5, 12, 3, verify_len=6, chunk=3)


def test_logits_of_shared_rows_are_those_of_float64():
    assert check(world(), SHARED, 3) < 1e-5


@pytest.mark.parametrize("share", verify_len.POLICIES)
def test_steps_of_shared_rows_gain_what_is_forced(share):
    run = world()
    accept = run.forced(2)
    decoder = run.decoder(replace(SHARED, share=share), [3], accept)
    stepper = Stepper(decoder, run.admit(decoder, 3, 20), accept)
    stepper.force(2)
    check_advance(stepper)
    stepper.check()
    assert run.operations(SHARED, 3) < run.operations(BlockSetting(1, 5, 12, 3), 3)
    lens = {
        int(length)
        for captured in decoder.runner._captured.values()
        for length in captured[3].program.steps[0].shared.buffers.lens
    }
    assert share != "each" or lens == {6}


def test_a_batch_walks_as_an_engine_decodes():
    """Request by request, and the shares of all together."""
    tokens, nodes = 12, 32
    texts = verify_len.texts("cpu", 2, tokens, nodes)
    target, draft = pair("cpu", torch.float32, kind="dflash")
    prompts = held_out_prompts(2, target.tokenizer)
    for setting in (
        BlockSetting(1, verify_len.DEPTH, 8),
        SharedSetting(1, verify_len.DEPTH, nodes, verify_len=8, chunk=4),
    ):
        engine = Engine(target, draft, setting.config(256, 2), buckets=[2], graphs=False)
        outs = engine.add([Request(prompt, 60, ignore_eos=True) for prompt in prompts])
        steps = 0
        while all(sum(out.accept_lens) < tokens for out in outs):
            engine.step()
            steps += 1
        # the last step may leave the recorded texts
        gained = sum(sum(out.accept_lens[:-1]) for out in outs)
        found = verify_len.walk(texts, setting, 2, steps - 1)
        assert steps > 2
        assert found["tokens_per_step"] == pytest.approx(gained / (2 * (steps - 1)), abs=1e-4)


def test_rows_go_where_drafts_are_sure():
    """Of two kinds of texts, those whose trees are kept, and whose draft says so, get the rows."""
    nodes, depth = 64, 15
    sure, lost = (p ** torch.arange(nodes).expand(40, -1) for p in (0.97, 0.5))
    chain = torch.arange(1, depth + 1).expand(40, -1) * 3
    texts = [Text(sure, chain), Text(lost, torch.full((40, depth), nodes))] * 2
    whole = verify_len.walk(texts, BlockSetting(1, depth, 16), 4, 3)
    shared = verify_len.walk(texts, SharedSetting(1, depth, nodes, verify_len=16), 4, 3)
    assert (shared["verified_p10"], shared["verified_p90"]) == (8, 24)
    assert shared["tokens_per_step"] > whole["tokens_per_step"]


def test_a_record_has_both_parts(monkeypatch, tmp_path):
    out = tmp_path / "lens.json"
    cells = [({"setting": "plain", "us": 1.0}, None)] * 2
    text = Text(torch.rand(3, 64), torch.full((3, 15), 64))
    monkeypatch.setattr(verify_len, "WALK", 2)
    monkeypatch.setattr(verify_len, "texts", lambda *_: [text] * 12)
    monkeypatch.setattr(verify_len, "_steps", lambda *_: (cell for cell, _ in cells))
    monkeypatch.setattr("sys.argv", ["bench.verify_len", "--batch", "4", "--out", str(out)])
    verify_len.main()
    record = json.loads(out.read_text())
    assert len(record["cells"]) == 2
    assert [one["setting"] for one in record["gains"]][-1] == "16 of 64 by probability"
    assert all(one["tokens_per_step"] == 1 for one in record["gains"])
