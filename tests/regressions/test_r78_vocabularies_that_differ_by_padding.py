"""R78: vllm#46435.

A head whose vocabulary was padded to another size than the target's did not share the target's
projection, and nothing that it drafted was accepted.

A head is served whose vocabulary is the target's but for padding, and shares what it has not: as
much is accepted as of a head of the target's size. Another vocabulary is refused by name.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from specattn import Engine, Request, SpecConfig
from specattn.errors import ModelError
from specattn.models import HFTarget, load_dflash, load_draft
from specattn.models.hub import PAIR, PAIR_HEADS
from tests.worlds import DEVICE

LOADS = {"eagle3": load_draft, "dflash": load_dflash}


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return HFTarget.from_pretrained(PAIR / "target", dtype=torch.float32, device=DEVICE)


def load(target, kind: str, folder, size: int):
    """The shipped head, whose config names a vocabulary of this size."""
    shutil.copytree(PAIR_HEADS[kind], folder, dirs_exist_ok=True)
    settings = json.loads((folder / "config.json").read_text())
    if settings["draft_vocab_size"] == target.vocab_size:
        settings["draft_vocab_size"] = size
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": size}))
    return LOADS[kind](folder, target, dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize("kind", LOADS)
def test_as_much_is_accepted_as_of_a_head_of_one_size(target, tmp_path, kind):
    prompts = [target.tokenizer(text).input_ids for text in ("import os\n", "def read(path):")]
    found = []
    for more in (0, 128, 1000):
        head = load(target, kind, tmp_path, target.vocab_size + more)
        run = Engine(
            target.with_features(head.features), head, SpecConfig(5, 1, 6, 64, 2), buckets=[2]
        )
        outs = run.generate([Request(prompt, 12) for prompt in prompts])
        found.append([(out.tokens, out.accept_lens) for out in outs])
    assert found[0] == found[1] == found[2]
    assert all(max(lens) > 1 for _, lens in found[0])
    with pytest.raises(ModelError, match="which no padding of at most 1024 explains"):
        load(target, kind, tmp_path, target.vocab_size + 1025)
