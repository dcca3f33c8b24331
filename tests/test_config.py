from __future__ import annotations

import math

import pytest
import torch

from specattn.batch import ForwardMode
from specattn.config import AttnConfig, SpecConfig


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"num_steps": 5, "topk": 1, "num_draft_tokens": 5}, "num_draft_tokens must be num_steps"),
        ({"num_steps": 2, "topk": 2, "num_draft_tokens": 8}, "num_draft_tokens must be 2..7"),
        ({"num_steps": 0, "topk": 2, "num_draft_tokens": 1}, "num_steps 0"),
        ({"num_steps": 0, "topk": 1, "num_draft_tokens": 2}, "num_steps 0"),
        ({"num_steps": 65, "topk": 1, "num_draft_tokens": 66}, "num_steps must be 0..64"),
        ({"topk": 0}, "topk must be 1..64"),
        ({"page_size": 12}, "power of two"),
        ({"page_size": 1024}, "page_size must be 1..512"),
        ({"max_context_len": 3}, "max_context_len must be at least 6"),
        ({"max_num_reqs": 0}, "max_num_reqs"),
    ],
)
def test_impossible_settings_name_the_argument_and_its_limit(given, named):
    with pytest.raises(ValueError, match=named):
        SpecConfig(**given)


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


def test_layouts_follow_the_mode_table():
    config = SpecConfig(4, 3, 11)
    rows = {mode: config.layout(mode) for mode in ForwardMode if mode is not ForwardMode.EXTEND}
    assert (rows[ForwardMode.DECODE].q_len, rows[ForwardMode.DECODE].tail) == (1, 1)
    assert rows[ForwardMode.TARGET_VERIFY].q_len == rows[ForwardMode.TARGET_VERIFY].tail == 11
    # R06: the extend's width is the depth plus one, not the tree's width
    assert rows[ForwardMode.DRAFT_EXTEND].q_len == rows[ForwardMode.DRAFT_EXTEND].tail == 5
    steps = [config.layout(ForwardMode.DRAFT_DECODE, step) for step in range(3)]
    assert [(s.q_len, s.tail) for s in steps] == [(3, 3), (3, 6), (3, 9)]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"num_qo_heads": 6, "num_kv_heads": 4}, "multiple"),
        ({"head_dim": 0}, "head_dim"),
        ({"dtype": torch.float64}, "dtype"),
        ({"window_left": -2}, "window_left"),
        ({"logit_cap": -1.0}, "logit_cap"),
        ({"logit_cap": math.nan}, "logit_cap"),
        ({"v_head_dim": -1}, "v_head_dim"),
        ({"sm_scale": -0.1}, "sm_scale"),
        ({"sm_scale": math.nan}, "sm_scale"),
        ({"sm_scale": math.inf}, "sm_scale"),
        ({"latent": True}, "num_kv_heads must be 1 with latent, got 2"),
        ({"latent": True, "num_kv_heads": 1}, r"v_head_dim must be 1\.\.63 .* got 0"),
        ({"latent": True, "num_kv_heads": 1, "v_head_dim": 64}, r"v_head_dim .* got 64"),
        ({"latent": True, "num_kv_heads": 1, "v_head_dim": 48}, "sm_scale must be given"),
        ({"kv_dtype": torch.float8_e5m2}, r"kv_dtype must be .*e4m3fn, got torch\.float8_e5m2"),
        ({"kv_dtype": torch.float16}, r"kv_dtype must be dtype \(torch\.float32\) or"),
        (
            {
                "latent": True,
                "num_kv_heads": 1,
                "v_head_dim": 48,
                "sm_scale": 1.0,
                "kv_dtype": torch.float8_e4m3fn,
            },
            "kv_dtype must be dtype with latent",
        ),
        ({"split_keys": 64}, "split_keys must be a multiple of 128, got 64"),
        ({"split_keys": 0}, "split_keys must be a multiple of 128, got 0"),
    ],
)
def test_attention_geometry_is_checked(given, named):
    with pytest.raises(ValueError, match=named):
        AttnConfig(**({"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64} | given))


def test_geometry_defaults():
    config = AttnConfig(4, 2, 64)
    assert (config.v_head_dim, config.sm_scale) == (64, 0.125)
