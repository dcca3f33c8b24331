from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from specattn.batch import ForwardMode
from specattn.config import AttnConfig, SpecConfig
from specattn.speculative.sampling.params import SamplingBatch, SamplingParams


def test_widest_legal_tree_is_legal_and_one_more_is_not():
    assert SpecConfig(3, 4, 37).max_tree_nodes == 1 + 4 + 2 * 16
    with pytest.raises(ValueError, match=r"2\.\.37"):
        SpecConfig(3, 4, 38)


@pytest.mark.parametrize("setting", [(5, 1, 6), (4, 4, 16), (8, 2, 5), (1, 8, 9), (0, 1, 1)])
def test_plain_decoding_needs_a_slot_per_step_and_keeps_the_tables(setting):
    config = SpecConfig(*setting, 96, 5, 4, setting[1] == 1)
    plain = config.plain()
    assert (plain.num_steps, plain.topk, plain.num_draft_tokens, plain.reserve_len) == (0, 1, 1, 1)
    assert not plain.draft_sampling
    assert plain.plain() == plain
    for name in ("max_context_len", "max_num_reqs", "page_size"):
        assert getattr(plain, name) == getattr(config, name)


def test_configs_that_differ_in_the_tree_alone_have_one_plain_decoding():
    config = SpecConfig(3, 1, 6, 96, 5, 4, draft_len=9, tree="best_first", ranks=3)
    assert config.plain() == SpecConfig(5, 1, 6, 96, 5, 4, draft_sampling=True).plain()
    reset = [
        f.name for f in fields(config) if getattr(config, f.name) != getattr(config.plain(), f.name)
    ]
    assert reset == ["num_steps", "num_draft_tokens", "draft_len", "tree", "ranks"]


def test_layouts_follow_the_mode_table():
    config = SpecConfig(4, 3, 11)
    rows = {mode: config.layout(mode) for mode in ForwardMode}
    assert (rows[ForwardMode.DECODE].q_len, rows[ForwardMode.DECODE].tail) == (1, 1)
    assert rows[ForwardMode.TARGET_VERIFY].q_len == rows[ForwardMode.TARGET_VERIFY].tail == 11
    # R06: the extend's width is the depth plus one, not the tree's width
    assert rows[ForwardMode.DRAFT_EXTEND].q_len == rows[ForwardMode.DRAFT_EXTEND].tail == 5
    steps = [config.layout(ForwardMode.DRAFT_DECODE, step) for step in range(3)]
    assert [(s.q_len, s.tail) for s in steps] == [(3, 3), (3, 6), (3, 9)]


def test_geometry_defaults():
    config = AttnConfig(4, 2, 64)
    assert (config.v_head_dim, config.sm_scale) == (64, 0.125)


def test_a_step_reserves_the_slots_that_its_widest_forward_writes():
    """The draft writes ``topk`` slots per forward, verify one per node, extend one per depth."""
    for num_steps in range(1, 6):
        for topk in range(1, 5):
            most = 1 + topk + (num_steps - 1) * topk**2
            nodes = range(2, most + 1) if topk > 1 else [num_steps + 1]
            for num_draft_tokens in nodes:
                config = SpecConfig(num_steps, topk, num_draft_tokens)
                drafted = topk * (num_steps - 1)
                assert config.reserve_len >= drafted
                assert config.reserve_len >= num_draft_tokens
                assert config.reserve_len >= num_steps + 1
                assert config.reserve_len in (drafted, num_draft_tokens, num_steps + 1)
    assert SpecConfig(2, 2, 2).reserve_len == 3, "here the extend is the widest"
    assert SpecConfig(0, 1, 1).reserve_len == 1


def test_a_batch_holds_what_its_requests_asked_for():
    params = [
        SamplingParams(0.5, 7, 0.25, 2**40 + 3),
        SamplingParams(seed=-(2**63)),
        SamplingParams(),
    ]
    batch = SamplingBatch.of(params, torch.device("cpu"))
    assert not batch.greedy
    assert batch.temperature.tolist() == [0.5, 0, 0]
    assert batch.top_k.tolist() == [7, 0, 0]
    assert batch.top_p.tolist() == [0.25, 1, 1]
    assert batch.seeds.tolist() == [2**40 + 3, -(2**63), 0]
    plain = SamplingBatch.of(params[1:], torch.device("cpu"))
    assert plain.greedy
    assert plain.top_k is None
    assert plain.top_p is None
