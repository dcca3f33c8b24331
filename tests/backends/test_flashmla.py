"""What the conformance kit does not see of FlashMLA; all but its kernels without a Hopper GPU."""

from __future__ import annotations

import inspect
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from specattn.backends.flashmla import FlashMlaBackend
from specattn.config import AttnConfig
from specattn.errors import UnsupportedError
from specattn.testing.oracle import head
from specattn.testing.session import config_of, plan_of
from tests.oracle import (
    Case,
    Tolerances,
    check,
    make_extend_case,
    make_lists_case,
    make_tree_case,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CUDA = DEVICE == "cuda"
BF16 = torch.bfloat16
TOLERANCES = Tolerances(lse=3e-3)
REASONS = FlashMlaBackend.reasons
FORM: dict[str, Any] = {
    "heads": (4, 1),
    "head_dim": 576,
    "v_head_dim": 512,
    "latent": True,
    "dtype": BF16,
    "page_size": 64,
    "device": DEVICE,
}


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    if CUDA:
        if reasons := REASONS(None, torch.device(DEVICE)):
            pytest.skip("; ".join(reasons))
        return
    monkeypatch.setattr(FlashMlaBackend, "module", "tests.backends.stand_ins")


def bind(case: Case):
    return FlashMlaBackend(config_of(case), torch.device(DEVICE)).bind(plan_of(case))


def attend(bound, case: Case) -> None:
    case.clear()
    bound.schedule(None)
    bound.fill()
    bound.run(case.q, case.k_cache, case.v_cache, case.out, case.lse)


CASES: dict[str, dict[str, Any]] = {
    "decode_128_heads": {"lengths": [33, 0], "q_len": 1, "heads": (128, 1)},
    "chain_20_heads": {"lengths": [60, 0, 130], "q_len": 9, "heads": (20, 1)},
    # tails over a page's end, and a page of their own
    "page_ends": {"lengths": [0, 61, 62, 63, 64, 290], "q_len": 4, "pads": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_kit_does_not_sweep_equals_the_oracle(name):
    """Keys past the last of a page hold NaN."""
    case = make_tree_case(mode="chain", **(FORM | CASES[name]))
    attend(bind(case), case)
    check(*head(case, case.expected()), tolerances=TOLERANCES)


def test_the_installed_library_takes_what_it_is_called_with():
    library = import_module(FlashMlaBackend.module)
    inspect.signature(library.get_mla_metadata).bind(0, 0, 0)
    inspect.signature(library.flash_mla_with_kvcache).bind(
        0, 0, 0, 0, 512, 0, 0, softmax_scale=0.1, causal=True
    )


def test_what_cannot_be_served_is_refused_by_name():
    cases = {
        "trees are not served": make_tree_case([9, 3], q_len=5, **FORM),
        "index lists are not served": make_lists_case([9], topk=2, step=1, **FORM),
        "prompts are not served": make_extend_case([(3, 4)], **FORM),
        "page_size must be a multiple of 64, got 32": make_tree_case(
            [3], mode="chain", q_len=1, **(FORM | {"page_size": 32})
        ),
    }
    for reason, case in cases.items():
        with pytest.raises(UnsupportedError, match=reason):
            bind(case)
    case = make_tree_case([3], mode="chain", q_len=1, **FORM)
    bound = bind(case)
    bound.fill()
    with pytest.raises(ValueError, match=r"v_cache must be k_cache\[\.\.\., :512\]"):
        bound.run(case.q, case.k_cache, case.v_cache.clone(), case.out)
    attend(bound, case)
    check(case, case.expected(), tolerances=TOLERANCES)


@pytest.mark.parametrize("kind", [ImportError, AttributeError, RuntimeError])
def test_kernels_that_do_not_load_are_an_error_with_their_cause(monkeypatch, kind):
    def broken(*args):
        raise kind("Failed to load sgl_kernel.flashmla_ops extension")

    config = config_of(make_tree_case([3], mode="chain", q_len=1, **FORM))
    library = import_module(FlashMlaBackend.module)
    monkeypatch.setattr(library, "get_mla_metadata", broken)
    with pytest.raises(UnsupportedError, match="Failed to load"):
        FlashMlaBackend(config, torch.device(DEVICE))


def test_reasons_name_the_limits(monkeypatch):
    config = AttnConfig(16, 1, 576, v_head_dim=512, sm_scale=0.1, dtype=BF16, latent=True)
    device = torch.device(DEVICE)
    here = REASONS(None, device)
    assert REASONS(config, device) == here
    for change, reason in (
        ({"latent": False}, "only latent layers are served"),
        ({"head_dim": 320, "v_head_dim": 256}, "a row must be 512 + 64 numbers, got 256 + 64"),
        ({"dtype": torch.float32}, "dtype must be float16 or bfloat16"),
        ({"window_left": 8}, "window_left is not served, got 8"),
        ({"logit_cap": 2.0}, "logit_cap is not served, got 2.0"),
    ):
        (found,) = REASONS(replace(config, **change), device)[len(here) :]
        assert reason in found
    monkeypatch.setattr("specattn.backends.paged.installed", lambda module: False)
    found = "; ".join(REASONS(None, torch.device("cpu")))
    assert "is not installed (pip install sglang-kernel)" in found
    assert "flashmla needs a CUDA device of compute capability 9.x, got cpu" in found
