"""What the conformance kit does not see of FlashInfer's MLA wrapper; a stand-in without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specattn.backends.flashinfer_mla import FlashInferMlaBackend
from specattn.config import AttnConfig
from specattn.errors import UnsupportedError
from specattn.testing.oracle import head
from specattn.testing.session import config_of, plan_of
from tests.backends import fake_flashinfer as fake
from tests.oracle import (
    Case,
    check,
    make_extend_case,
    make_tree_case,
    tolerances_of,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CUDA = DEVICE == "cuda"
BF16 = torch.bfloat16
TOLERANCES = tolerances_of("flashinfer_mla")
REASONS = FlashInferMlaBackend.reasons
FORM: dict[str, Any] = {
    "heads": (4, 1),
    "head_dim": 576,
    "v_head_dim": 512,
    "latent": True,
    "dtype": BF16,
    "device": DEVICE,
}


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    fake.install(monkeypatch)


def bind(case: Case):
    return FlashInferMlaBackend(config_of(case), torch.device(DEVICE)).bind(plan_of(case))


def lens_of(case: Case) -> torch.Tensor:
    return torch.tensor(case.prefix_lens, dtype=torch.int32)


def attend(bound, case: Case) -> None:
    case.clear()
    bound.schedule(lens_of(case))
    bound.fill()
    bound.run(case.q, case.k_cache, case.v_cache, case.out, case.lse)


CASES: dict[str, dict[str, Any]] = {
    "decode_128_heads": {"lengths": [33, 0], "q_len": 1, "heads": (128, 1)},
    # the last keys alone in a tile, and in a part of a split list
    "chain": {"lengths": [0, 61, 62, 63, 64, 29, 30, 290], "q_len": 4, "pads": 1},
    "chain_128_heads": {"lengths": [61, 0], "q_len": 3, "heads": (128, 1)},
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_kit_does_not_sweep_equals_the_oracle(name):
    case = make_tree_case(mode="chain", **(FORM | CASES[name]))
    attend(bind(case), case)
    check(*head(case, case.expected()), tolerances=TOLERANCES)


@pytest.mark.parametrize("heads", [4, 128])
@pytest.mark.parametrize("scheduled", [True, False])
def test_a_ragged_prompt_equals_the_oracle(scheduled, heads):
    form = FORM | {"heads": (heads, 1)}
    case = make_extend_case([(0, 9), (5, 1), (70, 0), (61, 4), (0, 1)], **form)
    bound = bind(case)
    if scheduled:
        bound.schedule(lens_of(case))
    bound.fill()
    bound.run(case.q, case.k_cache, case.v_cache, case.out, case.lse)
    check(case, case.expected(), tolerances=TOLERANCES)


def test_what_cannot_be_served_is_refused_by_name():
    tree = make_tree_case([9, 3], q_len=5, **FORM)
    with pytest.raises(UnsupportedError, match="trees are not served"):
        bind(tree)
    long = make_tree_case([3], mode="chain", q_len=1, **FORM)
    bound = bind(long)
    with pytest.raises(UnsupportedError, match=r"'flashinfer_mla'.*needs seq_lens_cpu, got None"):
        bound.schedule(None)
    with pytest.raises(ValueError, match=r"seq_lens_cpu must be 0\.\."):
        bound.schedule(torch.tensor([-1], dtype=torch.int32))
    bound.schedule(lens_of(long))
    bound.fill()
    with pytest.raises(ValueError, match=r"v_cache must be k_cache\[\.\.\., :512\]"):
        bound.run(long.q, long.k_cache, long.v_cache.clone(), long.out)
    attend(bound, long)
    check(long, long.expected(), tolerances=TOLERANCES)


def test_more_work_than_flashinfer_plans_is_refused():
    """It would write past its pinned buffer."""
    case = make_tree_case([3], mode="chain", q_len=1, **FORM)
    bound = bind(case)
    bound._check_pieces(torch.tensor([0, 500_000], dtype=torch.int32))
    with pytest.raises(UnsupportedError, match="FlashInfer plans up to 16384"):
        bound._check_pieces(torch.tensor([0, 530_000], dtype=torch.int32))


def test_reasons_name_the_limits(monkeypatch):
    config = AttnConfig(16, 1, 576, v_head_dim=512, sm_scale=0.1, dtype=BF16, latent=True)
    device = torch.device(DEVICE)
    here = REASONS(None, device)
    assert REASONS(config, device) == here
    for change, reason in (
        ({"latent": False}, "only latent layers are served"),
        ({"head_dim": 320, "v_head_dim": 256}, "a row must be 512 + 64 numbers, got 256 + 64"),
        ({"dtype": torch.float16}, "dtype must be bfloat16, got torch.float16"),
        ({"num_qo_heads": 20}, "num_qo_heads must divide 128, got 20"),
        ({"sm_scale": 1e-4}, "sm_scale must be at least 0.001"),
        ({"window_left": 8}, "window_left is not served, got 8"),
        ({"logit_cap": 2.0}, "logit_cap is not served, got 2.0"),
    ):
        (found,) = REASONS(replace(config, **change), device)[len(here) :]
        assert reason in found
    monkeypatch.setattr("specattn.backends.paged.installed", lambda module: False)
    assert REASONS(None, torch.device("cpu")) == [
        "flashinfer is not installed (pip install flashinfer-python, Linux only)",
        "FlashInfer needs a CUDA device, got cpu",
    ]
