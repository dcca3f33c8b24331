"""Forced acceptance over a step's tensors."""

from __future__ import annotations

import pytest
import torch

from specattn import SpecConfig
from specattn.batch import AcceptResult, DraftTree
from specattn.integrations.sglang.simulated import TOKEN, Simulated
from specattn.speculative.sampling.params import SamplingBatch

CONFIG = SpecConfig(3, 2, 6)


def kept(length: float, batch: int) -> AcceptResult:
    """Return what is kept of trees of six nodes, at different positions."""
    nodes, depth = CONFIG.num_draft_tokens, CONFIG.num_steps + 1
    tokens = torch.zeros(batch, nodes, dtype=torch.int64)
    tree = DraftTree(*[tokens] * 5, torch.empty(batch, 0, 0))
    seeds, zeros = torch.arange(batch), torch.zeros(batch)
    sampling = SamplingBatch(True, zeros, None, None, seeds)
    out = AcceptResult(
        torch.zeros(batch, depth, dtype=torch.int32),
        torch.zeros(batch, depth, dtype=torch.int64),
        torch.zeros(batch, dtype=torch.int32),
        torch.zeros(batch, dtype=torch.int64),
    )
    logits = torch.zeros(batch, nodes, 11)
    lens = torch.arange(batch, dtype=torch.int32)
    return Simulated(length)(tree, logits, lens, CONFIG, sampling, out)


@pytest.mark.parametrize(("length", "whole"), [(0.5, 1), (1, 1), (3, 3), (4, 4), (9, 4)])
def test_whole_numbers_are_gained_by_all(length, whole):
    found = kept(length, 5)
    gap = CONFIG.num_steps + 1 - whole
    assert found.accept_lens.tolist() == [whole] * 5
    assert found.accept_tokens.tolist() == [[TOKEN] * whole + [0] * gap] * 5
    assert found.accept_index.tolist() == [[*range(whole), *[-1] * gap]] * 5
    assert found.bonus_tokens.tolist() == [TOKEN] * 5


def test_a_number_between_is_met_by_the_mean():
    lens = kept(2.25, 4000).accept_lens
    assert set(lens.tolist()) == {2, 3}
    # five standard deviations
    assert abs(lens.double().mean().item() - 2.25) < 5 * (0.25 * 0.75 / 4000) ** 0.5
