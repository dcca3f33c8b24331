"""R48: vllm#54506, tokenspeed#904, mlx-lm#1423.

At temperature 0, speculation and plain decoding differ in the last bits: verify and decode have
other tiles and splits.

With `deterministic`, a node of a tree has the bits of decoding at the end of its path, beside any
other requests. Under a model that treats every row alone, speculation then computes the very
logits of plain decoding; without it, it does not.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from specattn.backends import load_backend
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from specattn.testing.determinism import same_batches, same_paths
from specattn.testing.setting import MODES, Setting
from tests.tiny import TinyDraft, TinyTarget
from tests.worlds import DEVICE

NEW_TOKENS = 5
# on a GPU, long enough that its many chunks of work have several tiles
SCALE = 31 if DEVICE.type == "cuda" else 1
PROMPTS = [
    [(7 * i) % 61 for i in range(124 * SCALE)],
    [(5 * i + 1) % 61 for i in range(30 * SCALE)],
]


class ByRow(nn.Linear):
    """A matrix product whose bits do not depend on the number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([nn.functional.linear(row, self.weight) for row in x])


class RecordingTarget(TinyTarget):
    """Keeps the logits of every token that a decode or verify forward ran."""

    def __init__(self) -> None:
        super().__init__(layers=1, device=DEVICE)
        for part in (self, *self.blocks):
            for name, layer in part.named_children():
                if isinstance(layer, nn.Linear):
                    layer.__class__ = ByRow
                    assert getattr(part, name) is layer
        # a cut between the first prompt's tokens
        self.layers = tuple(replace(config, split_keys=128) for config in self.layers)
        self.seen: dict[tuple[int, int], list[torch.Tensor]] = {}

    def forward(self, input_ids, positions, attend, rows=None):
        out = super().forward(input_ids, positions, attend, rows)
        if rows is None:
            keys = zip(positions.tolist(), input_ids.tolist(), strict=True)
            for key, logits in zip(keys, out.logits, strict=True):
                # the forward that readies the buffers is at position 0
                if key[0]:
                    self.seen.setdefault(key, []).append(logits.clone())
        return out


def generate(prompts: list[list[int]], steps: int, deterministic: bool):
    target = RecordingTarget()
    config = SpecConfig(
        steps,
        2 if steps else 1,
        5 if steps else 1,
        max_num_reqs=2,
        max_context_len=len(PROMPTS[0]) + 36,
    )
    engine = Engine(
        target,
        TinyDraft(device=DEVICE),
        config,
        backend="triton",
        graphs=False,
        deterministic=deterministic,
    )
    out = engine.generate([Request(prompt, NEW_TOKENS) for prompt in prompts])
    return [result.tokens for result in out], target.seen


def differing(plain, speculative) -> int:
    """Tokens of plain decoding whose logits no row of the speculative run has."""
    return sum(
        not any(torch.equal(logits, other) for other in speculative.get(key, []))
        for key, (logits,) in plain.items()
    )


@pytest.mark.parametrize("deterministic", [True, False])
def test_speculation_computes_the_logits_of_plain_decoding(deterministic):
    tokens, verified = generate(PROMPTS, 2, deterministic)
    total = 0
    for prompt, mine in zip(PROMPTS, tokens, strict=True):
        (plain,), decoded = generate([prompt], 0, deterministic)
        assert plain == mine
        total += differing(decoded, verified)
    assert (total == 0) == deterministic, f"{total} tokens have other logits"


@pytest.mark.parametrize("mode", ["draft_tree"])
def test_a_row_does_not_know_its_mode_nor_its_batch(mode):
    setting = Setting(load_backend("triton"), DEVICE, deterministic=True)
    same_paths(setting, MODES[mode])
    same_batches(setting, MODES[mode])
