"""FlashInfer's MLA wrapper against the oracle; without a GPU, everything but its kernels."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch

from specattn.backends.flashinfer_mla import FlashInferMlaBackend
from specattn.config import AttnConfig
from specattn.errors import UnsupportedError
from specattn.testing.oracle import head
from specattn.testing.session import config_of, plan_of
from tests.backends.fake_flashinfer import PROCESSORS, Event
from tests.oracle import (
    Case,
    check,
    make_extend_case,
    make_lists_case,
    make_tree_case,
    tolerances_of,
)
from tests.recordings import recorded, refill

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


class Wrapper:
    """The host side of FlashInfer's wrapper, and its kernels in plain torch.

    The lists are read where the plan says, not where the buffer of offsets does: the kernels have
    their own copy of a plan, made when it was.
    """

    def __init__(
        self,
        float_workspace_buffer,
        use_cuda_graph=False,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        backend="auto",
    ):
        processed = PROCESSORS * 128 * (512 * 2 + 4)
        assert float_workspace_buffer.numel() >= processed
        self.graph = use_cuda_graph
        self.buffers = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        self._kv_indices_buf = kv_indices

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
    ):
        given = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        for tensor in (qo_indptr, kv_indptr, kv_len_arr):
            assert tensor.device.type == "cpu", "a plan must not read the device"
            assert tensor.dtype == torch.int32
        assert (head_dim_ckv, head_dim_kpe, page_size) == (512, 64, 1)
        assert q_data_type == kv_data_type == BF16
        assert 128 % num_heads == 0
        if self.graph:
            for buffer, tensor in zip(self.buffers, given, strict=True):
                buffer[: len(tensor)].copy_(tensor)
            self.indices = self.buffers[2]
        else:
            assert (qo_indptr.diff() > 0).all(), "they would skew the tile"
            self.indices = kv_indices
        self.work = [t.tolist() for t in (qo_indptr, kv_indptr, kv_len_arr)]
        self.causal, self.scale = causal, sm_scale

    def run(self, q_nope, q_pe, ckv, kpe, out, lse, return_lse, return_lse_base_on_e):
        assert ckv.shape[1:] == (1, 512)
        assert kpe.shape[1:] == (1, 64)
        assert return_lse_base_on_e
        assert return_lse == (lse is not None)
        rows, starts, lens = self.work
        for b, length in enumerate(lens):
            slots = self.indices[starts[b] : starts[b] + length].long()
            for row in range(rows[b], rows[b + 1]):
                seen = slots[: length - (rows[b + 1] - row) + 1] if self.causal else slots
                keys, values = torch.cat([ckv, kpe], -1)[seen, 0], ckv[seen, 0]
                q = torch.cat([q_nope[row], q_pe[row]], -1)
                logits = q.double() @ keys.double().T * self.scale
                out[row] = logits.softmax(-1) @ values.double() if len(seen) else 0.0
                if lse is not None:
                    lse[row] = logits.logsumexp(-1)


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    install(monkeypatch)


def install(monkeypatch):
    """Take the library's place on a machine without a GPU; with one, skip without the library."""
    if CUDA:
        if reasons := REASONS(None, torch.device(DEVICE)):
            pytest.skip("; ".join(reasons))
        return
    package, module = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    package.__spec__ = ModuleSpec("flashinfer", None)
    module.BatchMLAPagedAttentionWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(FlashInferMlaBackend, "processors", lambda _: PROCESSORS)


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
    "decode": {"lengths": [0, 1, 63, 64, 200], "q_len": 1, "pads": 2},
    "decode_16_heads": {"lengths": [130, 0, 65], "q_len": 1, "heads": (16, 1)},
    "decode_128_heads": {"lengths": [33, 0], "q_len": 1, "heads": (128, 1)},
    "draft_step_2": {"lengths": [40, 0, 150], "q_len": 1, "tail_len": 3, "pads": 1},
    # the last keys alone in a tile, and in a part of a split list
    "chain": {"lengths": [0, 61, 62, 63, 64, 29, 30, 290], "q_len": 4, "pads": 1},
    "chain_16_heads": {"lengths": [60, 0, 130], "q_len": 9, "heads": (16, 1)},
    "chain_128_heads": {"lengths": [61, 0], "q_len": 3, "heads": (128, 1)},
    "one_request": {"lengths": [700], "q_len": 5},
}


@pytest.mark.parametrize("name", CASES)
def test_every_causal_mode_equals_the_oracle(name):
    case = make_tree_case(mode="chain", **(FORM | CASES[name]))
    attend(bind(case), case)
    check(*head(case, case.expected()), tolerances=TOLERANCES)


@pytest.mark.parametrize("lse", [True, False])
def test_index_lists_of_draft_steps(lse):
    case = make_lists_case([40, 0, 150], topk=3, step=2, pads=1, **FORM)
    bound = bind(case)
    bound.schedule(lens_of(case))
    bound.fill()
    bound.run(case.q, case.k_cache, case.v_cache, case.out, case.lse if lse else None)
    check(case, case.expected(), lse=lse, tolerances=TOLERANCES)


def test_lists_may_be_written_after_the_fill():
    case = make_lists_case([40, 0, 70], topk=2, step=1, **FORM)
    plan = plan_of(case)
    late = replace(plan, kv_indices=torch.zeros_like(plan.kv_indices))
    bound = FlashInferMlaBackend(config_of(case), torch.device(DEVICE)).bind(late)
    bound.schedule(lens_of(case))
    bound.fill()
    late.kv_indices.copy_(plan.kv_indices)
    bound.run(case.q, case.k_cache, case.v_cache, case.out, case.lse)
    check(case, case.expected(), tolerances=TOLERANCES)


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


@pytest.mark.parametrize(("q_len", "tail"), [(1, 1), (5, 5), (1, 3)])
def test_a_recording_serves_other_lengths(q_len, tail):
    """Recorded over empty prefixes; eager without a GPU, over the same buffers."""
    first, *others = (
        make_tree_case(
            lengths,
            mode="chain",
            q_len=q_len,
            tail_len=tail,
            pads=1,
            width=700,
            slots=1600,
            seed=seed,
            **FORM,
        )
        for seed, lengths in enumerate([[0] * 3, [5, 0, 130], [600, 299, 1], [64, 61, 63]])
    )
    bound = bind(first)

    def step() -> None:
        bound.fill()
        bound.run(first.q, first.k_cache, first.v_cache, first.out, first.lse)

    bound.schedule(lens_of(first))
    replay = recorded(step)
    for case in others:
        refill(first, case)
        bound.schedule(lens_of(case))
        replay()
        check(*head(first, case.expected()), tolerances=TOLERANCES)


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
