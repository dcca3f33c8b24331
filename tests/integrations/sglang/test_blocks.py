"""Steps over DFlash heads: texts are transformers', drawn ones and verify counts `Engine`'s."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integrations.sglang.blocks import AGAIN, DRAWN, LONG, PROMPTS, SETTINGS, write
from tests.integrations.sglang.heads import NEW
from tests.integrations.sglang.test_algorithm import result

pytestmark = pytest.mark.sglang
ONE_TREE = [name for name in SETTINGS if not SETTINGS[name].trees]


@functools.cache
def run(name: str) -> SimpleNamespace:
    """What SGLang got, transformers' model, and the folders of both models."""
    room = Path(tempfile.mkdtemp())
    folder, head = room / "target", room / "head"
    model = write(SETTINGS[name], folder, head)
    found = result("blocks", name, str(folder), str(head), SPECATTN_COUNTS=str(room / "counts"))
    found["counts"] = json.loads((room / "counts").read_text())
    return SimpleNamespace(**found, model=model, folder=folder, head=head)


def plain(model: Any, prompt: list[int]) -> list[int]:
    """Return transformers' greedy text."""
    # past all ends: no token has this number
    ends = {"eos_token_id": -1, "pad_token_id": 0}
    out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, **ends)
    return out[0, len(prompt) :].tolist()


@functools.cache
def own(name: str) -> dict[str, list[Any]]:
    """What `Engine` gets for the same prompts."""
    from specattn import Engine, Request, SamplingParams, SpecConfig
    from specattn.models import HFTarget, load_dflash

    ran, setting = run(name), SETTINGS[name]
    target = HFTarget.from_pretrained(str(ran.folder), dtype=torch.float32)
    draft = load_dflash(str(ran.head), target)
    page = setting.options.get("page_size", 1)
    depth = draft.block.size - 1
    config = SpecConfig(depth, 1, depth + 1, 256, 6, page)
    if setting.tree is not None:
        steps, ranks, nodes = setting.tree
        config = SpecConfig(steps, 1, nodes, 256, 6, page, tree="best_first", ranks=ranks)
    engine = Engine(target.with_features(draft.features), draft, config, buckets=[6])
    parts = {
        "first": [(prompt, {}) for prompt in PROMPTS],
        "again": [(prompt, {}) for prompt in AGAIN],
        "drawn": [(LONG[:9], asked) for asked in (*DRAWN, {})],
    }
    return {
        part: engine.generate(
            [
                Request(list(prompt), NEW, sampling=SamplingParams(**params), ignore_eos=True)
                for prompt, params in asked
            ]
        )
        for part, asked in parts.items()
    }


def tokens(found: list[dict[str, Any]]) -> list[list[int]]:
    return [one["tokens"] for one in found]


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_texts_are_the_targets(name: str) -> None:
    """The prompts join and end on their own, and the longest comes in pieces."""
    ran = run(name)
    assert tokens(ran.first) == [plain(ran.model, prompt) for prompt in PROMPTS]
    assert tokens(ran.again) == [plain(ran.model, prompt) for prompt in AGAIN]
    assert ran.drawn[-1]["tokens"] == plain(ran.model, LONG[:9])


@pytest.mark.parametrize("name", ONE_TREE)
@pytest.mark.parametrize("part", ["first", "again"])
def test_verify_counts_are_those_of_this_librarys_engine(name: str, part: str) -> None:
    """After hits of the radix cache, too: the head's keys lie by the target's slots."""
    found = getattr(run(name), part)
    counts = [one["verified"] for one in found]
    assert counts == [one.steps for one in own(name)[part]]
    # drafts are kept
    assert sum(counts) < (NEW - 1) * len(counts) - 4
    assert part == "first" or min(one["cached"] for one in found[:3]) >= 32


@pytest.mark.parametrize("name", ONE_TREE)
def test_drawn_texts_are_those_of_this_librarys_engine(name: str) -> None:
    texts = tokens(run(name).drawn)
    assert texts == [one.tokens for one in own(name)["drawn"]]
    assert texts[0] != texts[1]


@pytest.mark.parametrize("name", SETTINGS)
def test_both_models_are_fused_unless_the_environment_says_0(name: str) -> None:
    fused = 2 if SETTINGS[name].fused == "1" else 0
    assert run(name).counts["fused models"] == fused
