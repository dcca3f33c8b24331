"""R69: vllm#57941, vllm#57964, vllm#58080, vllm#52873.

A draft whose longest position is below the target's context read past its rotary table, or gave up
on the whole batch once one request was longer, and acceptance was gone for good.

A draft rotates every position that the target's context has: how much it is right does not depend
on the length that its config names, nor on the requests beside. A rope type that would rotate a
whole batch by its longest request is refused by name, in drafts as in targets.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from specattn import Engine, Request, SpecConfig
from specattn.errors import ModelError
from specattn.models import HFTarget, fuse, load_dflash, load_draft, load_lm_draft
from specattn.models.hub import PAIR
from tests.samples import sampled, star
from tests.worlds import DEVICE

SHORTEST, NEW = 32, 8
CONFIG = SpecConfig(5, 1, 6, 128, 2)
LOADS = {
    "eagle3": (load_draft, "draft"),
    "dflash": (load_dflash, "dflash"),
    "model": (load_lm_draft, "target"),
}
TEXT = """class Reader:
    def __init__(self, path):
        self.path = path

    def read(self):
        with open(self.path) as file:
            return file.read()

    def lines(self):
"""
RESCALING = {
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "longrope": {
        "type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": SHORTEST,
        "short_factor": [1.0] * 32,
        "long_factor": [4.0] * 32,
    },
}


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return HFTarget.from_pretrained(PAIR / "target", dtype=torch.float32, device=DEVICE)


def models(target, kind: str, folder, *, fused: bool = False, **changes):
    """A draft of the shipped pair with changes of its config, and the target for it."""
    load, name = LOADS[kind]
    shutil.copytree(PAIR / name, folder / kind, dirs_exist_ok=True)
    settings = json.loads((folder / kind / "config.json").read_text())
    if changes.get("rope_scaling"):
        settings.pop("rope_parameters", None)
    (folder / kind / "config.json").write_text(json.dumps(settings | changes))
    draft = load(folder / kind, target, dtype=torch.float32, device=DEVICE)
    if kind != "model":
        target = target.with_features(draft.features)
    return fuse(target, draft) if fused else (target, draft)


@pytest.mark.parametrize(
    ("kind", "fused"), [("eagle3", False), ("eagle3", True), ("dflash", False), ("model", False)]
)
def test_a_draft_goes_on_where_its_config_ends(target, tmp_path, kind, fused):
    long, short = (target.tokenizer(text).input_ids for text in (TEXT, "import os\n"))
    assert len(long) > SHORTEST > len(short) + NEW
    found = []
    for changes in ({}, {"max_position_embeddings": SHORTEST}):
        run = Engine(*models(target, kind, tmp_path, fused=fused, **changes), CONFIG, buckets=[2])
        outs = run.generate([Request(long, NEW), Request(short, NEW)])
        # and once the long one has passed
        outs += run.generate([Request(short, NEW)])
        found.append([(out.tokens, out.accept_lens) for out in outs])
    assert found[0] == found[1]
    assert found[0][1] == found[0][2]
    assert all(max(lens) > 1 for _, lens in found[0])


@sampled(star, kind=LOADS.keys(), rope=RESCALING.keys())
def test_a_rope_that_looks_at_the_batch_is_refused(target, tmp_path, kind, rope):
    length = 4 * SHORTEST if rope == "longrope" else SHORTEST
    changes = {"rope_scaling": RESCALING[rope], "max_position_embeddings": length}
    pair = models(target, kind, tmp_path, rope_theta=10000.0, **changes)
    with pytest.raises(ModelError, match=rf"{rope}.*at most {SHORTEST}, got 128") as caught:
        Engine(*pair, CONFIG)
    assert caught.value.argument == "draft"
    # transformers' models read the positions of such ropes on the host, which no graph can record
    run = Engine(*pair, SpecConfig(5, 1, 6, SHORTEST, 2), buckets=[2], graphs=False)
    (out,) = run.generate([Request(target.tokenizer("import os\n").input_ids, 99)])
    assert out.finish_reason == "context"
