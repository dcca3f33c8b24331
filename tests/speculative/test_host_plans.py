"""Attention that plans on the host: what it fills follows its own plan, not the last step's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specattn.backends import BoundAttention
from specattn.backends.torch_native import TorchNativeBackend
from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.sampling.params import SamplingParams
from tests.tiny import TinyDraft, TinyTarget, dense_greedy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[3, 14, 15, 9, 26, 5], [35, 2], [8, 9, 7, 9]]


class Planned(BoundAttention):
    """Attention that lists keys in `fill` where `schedule` has made room for them."""

    def __init__(self, inner, plan):
        self.inner, self.plan = inner, plan
        self.planned, self.filled = None, None

    def schedule(self, seq_lens_cpu):
        self.planned = seq_lens_cpu.tolist()

    def fill(self):
        assert self.planned == self.plan.seq_lens.tolist()
        self.filled = self.planned
        self.inner.fill()

    def run(self, *args):
        assert self.filled is self.planned, "what runs was filled before its plan was made"
        self.inner.run(*args)


class PlanningBackend(TorchNativeBackend):
    name = "planning"
    capabilities = replace(TorchNativeBackend.capabilities, graphs=False, host_plan=True)

    def bind(self, plan):
        return Planned(super().bind(plan), plan)


@pytest.mark.parametrize("tbo", [False, True])
def test_parts_that_are_captured_late_are_filled_after_their_plan(tbo):
    """Drafts, which are not captured again, have no plan for the padding that these run on."""
    models = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    config = SpecConfig(3, 4, 9, 64, 3)
    run = Engine(*models, config, backend=PlanningBackend, buckets=[3], tbo=tbo)
    assert run.decoder(config).cudagraph == "piecewise"
    (first,) = run.add([Request(PROMPTS[0], 20)])
    run.step()
    drawn = SamplingParams(0.8, seed=5)
    (second,) = run.add([Request(PROMPTS[1], 12, drawn)])
    while run.num_running:
        run.step()
    assert first.tokens == dense_greedy(models[0], PROMPTS[0], 20)
    alone = Engine(*models, config, backend="torch_native", buckets=[1])
    assert second.tokens == alone.generate([Request(PROMPTS[1], 12, drawn)])[0].tokens
