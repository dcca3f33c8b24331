"""R57: huggingface/transformers#47912, huggingface/transformers#48039.

Assisted generation looked for ends once per block: an end token or a stop string that was accepted
in the middle of a block did not end the text.

Inside transformers' `generate`, rows end at the token that ends them, whatever was accepted behind
it: the sequences, and what a streamer gets, are those of generation without drafts.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StopStringCriteria

import specattn
from specattn import SpecConfig
from specattn.engine.flight import Flight
from specattn.models.hub import PAIR
from tests.integrations.test_transformers import Streamed, build, prompts
from tests.regressions.known import Known

BLOCK = SpecConfig(num_steps=8, topk=1, num_draft_tokens=9)
NEW, PAD = 14, 0


@pytest.fixture
def runs(monkeypatch) -> list[int]:
    """How many tokens requests gain in their steps, as they come."""
    gained, collect = [], Flight._collect_group

    def spy(flight, step):
        gained.extend(map(len, step.pending.wait()))
        return collect(flight, step)

    monkeypatch.setattr(Flight, "_collect_group", spy)
    return gained


def known(inputs, sequences) -> Known:
    """What follows each prompt, without its padding."""
    width = inputs["input_ids"].shape[1]
    rows = zip(inputs["attention_mask"].bool(), sequences, strict=True)
    return Known([*row[:width][mask].tolist(), *row[width:].tolist()] for mask, row in rows)


@pytest.mark.parametrize("rows", [1, 3])
def test_an_end_token_within_a_block_ends_its_row(rows, runs):
    model, inputs = build(eos_token_id=None), prompts(rows)
    free = model.generate(**inputs, max_new_tokens=NEW)
    text = free[:, 9:]
    ends = [int(text[0, 6]), int(text[-1, 3])]
    options = {"max_new_tokens": NEW, "eos_token_id": ends, "pad_token_id": PAD}
    plain, drafted = Streamed(), Streamed()
    want = model.generate(**inputs, **options, streamer=plain)
    found = specattn.generate(
        model, **inputs, **options, draft=known(inputs, free), spec_config=BLOCK, streamer=drafted
    )
    assert torch.equal(found, want)
    assert drafted.given == plain.given
    assert max(runs) == BLOCK.num_steps + 1
    columns = {next((at for at, t in enumerate(r) if t in ends), NEW) for r in text.tolist()}
    assert min(columns) < 8, "the first block holds an end"
    assert len(columns) > 1 or rows == 1


@pytest.mark.parametrize("by", ["stop_strings", "stopping_criteria"])
def test_a_stop_string_within_a_block_ends_its_row(by, runs):
    model = AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target", padding_side="left")
    tokenizer.pad_token = tokenizer.decode([PAD])
    texts = ["def f(x):", "import os\nimport sys\n\n"]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    width = inputs["input_ids"].shape[1]
    free = model.generate(**inputs, max_new_tokens=24)
    pieces = [[tokenizer.decode(token) for token in row] for row in free[:, width:].tolist()]
    # each begins within a token and is complete within the fifth
    stops = [row[2][-1:] + row[3] + row[4][:1] for row in pieces]
    asked = {"stop_strings": stops, "tokenizer": tokenizer}
    want = model.generate(**inputs, max_new_tokens=24, **asked)
    if by == "stopping_criteria":
        asked = {"stopping_criteria": [StopStringCriteria(tokenizer, stops)]}
    found = specattn.generate(
        model, **inputs, max_new_tokens=24, **asked, draft=known(inputs, free), spec_config=BLOCK
    )
    assert torch.equal(found, want)
    assert want.shape[1] == width + 5
    assert max(runs) == BLOCK.num_steps + 1
