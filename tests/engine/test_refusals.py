"""What docs/requests.md says is refused is refused, with the words of the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.kernels.processors import check_bitmask
from specattn.speculative.sampling.params import SamplingParams
from tests.tiny import TinyTarget
from tests.worlds import DEVICE

PAGE = (Path(__file__).parents[2] / "docs" / "requests.md").read_text()
SECTION = PAGE.split("## What is refused\n")[1].split("\n## ")[0]
ROWS = re.findall(
    r"^\| `(.+?)`(?:, of `Engine.add`|, without a tokenizer)? \| `(.+?)`(?:, a `(\w+)`)? \|$",
    SECTION,
    re.M,
)
FIELDS = {*Request.__dataclass_fields__, *SamplingParams.__dataclass_fields__}


@pytest.fixture(scope="module")
def engine():
    return Engine(TinyTarget(device=DEVICE), None, SpecConfig(0, 1, 1, 64, 2), graphs=False)


def test_every_row_is_read():
    assert len(ROWS) == SECTION.count("\n|") - 2


@pytest.mark.parametrize(("asked", "message", "error"), ROWS, ids=[row[0] for row in ROWS])
def test_what_the_page_refuses_is_refused(engine, asked, message, error):
    """By the constructor, or by both calls of an engine; then nothing runs."""
    names = {"Request": Request, "SamplingParams": SamplingParams, "prompt": [3, 1, 4]}
    with pytest.raises(Exception, match=re.escape(message)) as refusal:  # noqa: PT012
        made = eval(asked, names)
        if isinstance(made, SamplingParams):
            made = Request(names["prompt"], sampling=made)
        requests = made if isinstance(made, list) else [made]
        if len(requests) == 1:
            with pytest.raises(ValueError, match=re.escape(message)):
                engine.generate(requests)
        engine.add([Request([5]), *requests] if len(requests) == 1 else requests)
    assert type(refusal.value).__name__ == (error or "ValueError")
    assert engine.num_running == 0
    assert engine.table.num_free_rows == 2


@pytest.mark.parametrize("other", ["path/to/model", torch.nn.Linear(2, 2)], ids=["path", "module"])
def test_what_is_no_model_is_refused_with_what_makes_one(other):
    config, kind = SpecConfig(1, 1, 2, 64, 2), type(other).__name__
    with pytest.raises(ValueError, match=rf"target must be an HFTarget .*, got a {kind}"):
        Engine(other, None, config)
    with pytest.raises(ValueError, match=rf"draft must be what load_draft, .*, got a {kind}"):
        Engine(TinyTarget(), other, config)


def test_a_tree_without_a_draft_is_refused_before_a_capture():
    with pytest.raises(ValueError, match=r"num_steps must be 0 .* without a draft, got 5"):
        Engine(TinyTarget(), None, SpecConfig(max_context_len=64, max_num_reqs=2))


def test_the_page_has_every_field():
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.M))
    # the example at the top has the first two, and grammars a section
    assert FIELDS - named == {"prompt", "sampling", "grammar"}


def test_a_bitmask_of_another_width_is_refused_in_the_words_of_the_page():
    with pytest.raises(ValueError, match="a bit per token of 61") as refusal:
        check_bitmask(torch.zeros(1, 1, 1, dtype=torch.int32), 1, 1, 61)
    assert f"`{refusal.value}`" in SECTION
