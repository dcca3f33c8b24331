"""R70: vllm-project/speculators#574.

The rope scaling of the target was dropped from its draft head: acceptance fell with the length of
the text.

A head rotates positions as its own config says, however that spells it: by `rope_scaling` beside
`rope_theta`, by `rope_parameters`, or nested as vLLM's speculators have it.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specattn.models import HFTarget, load_draft
from tests.models.conftest import TINY
from tests.models.heads import HT, eagle3_tensors, eagle_tensors, write
from tests.models.papers import rotate

POSITIONS = torch.tensor([0, 1, 500, 5000])
THETA, DIM = 700.0, 24
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NEW = {"rope_parameters": LLAMA3 | {"rope_theta": THETA}}
OLD = {"rope_theta": THETA, "rope_scaling": LLAMA3}
SPELLED = {
    "old": OLD,
    "new": NEW,
    "new beside the old theta": {"rope_theta": THETA, "rope_parameters": LLAMA3},
    "nested, old": {"transformer_layer_config": OLD},
    "nested, new": {"transformer_layer_config": NEW},
    "plain": {"rope_theta": THETA},
}


def frequencies(scaled: bool) -> torch.Tensor:
    """Llama 3's: long waves are stretched, those in between by as much as they are long."""
    half = DIM // 2
    plain = THETA ** -(torch.arange(half).double() / half)
    if not scaled:
        return plain
    found, trained = [], LLAMA3["original_max_position_embeddings"]
    for frequency in plain.tolist():
        turns = trained * frequency / (2 * math.pi)
        low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
        kept = min(max((turns - low) / (high - low), 0), 1)
        found.append(kept * frequency + (1 - kept) * frequency / LLAMA3["factor"])
    return torch.tensor(found, dtype=torch.float64)


@pytest.fixture(scope="module")
def target() -> HFTarget:
    torch.manual_seed(0)
    # of another rope than the head's
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    config = AutoConfig.for_model("llama", **TINY, rope_parameters=rope)
    return HFTarget.from_model(AutoModelForCausalLM.from_config(config).eval())


def rotated(head, positions: torch.Tensor) -> list[torch.Tensor]:
    """The queries and keys of one token at several positions."""
    found = []

    def attend(layer, q, k, v):
        found.extend([q, k])
        return q

    count = len(positions)
    ids, hidden = torch.full((count,), 5), torch.ones(1, HT).expand(count, -1) * 0.3
    head.forward(ids, hidden + torch.linspace(-1, 1, HT), positions, attend)
    return found


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("spelled", SPELLED)
def test_positions_are_rotated_as_the_config_says(target, tmp_path, spelled, kind):
    tensors = {"eagle": eagle_tensors, "eagle3": eagle3_tensors}[kind]()
    file = write(tmp_path, tensors) / "config.json"
    settings = json.loads(file.read_text())
    del settings["rope_theta"]
    file.write_text(json.dumps(settings | SPELLED[spelled]))
    head = load_draft(tmp_path, target).for_context(5001)
    angle = POSITIONS.double()[:, None] * frequencies(spelled != "plain")
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    plain = rotated(head, torch.zeros_like(POSITIONS))
    for found, still in zip(rotated(head, POSITIONS), plain, strict=True):
        a, b = still.double()[..., : DIM // 2], still.double()[..., DIM // 2 :]
        want = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        torch.testing.assert_close(found.double(), want, rtol=0, atol=2e-3)
        other = rotate(still.double(), POSITIONS.double(), THETA)
        assert torch.allclose(want, other, atol=1e-2) == (spelled == "plain")
