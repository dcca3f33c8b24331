"""The Triton backend whose requests share prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specattn.backends.base import fill_all
from specattn.backends.triton import (
    TritonBackend,
    TritonBound,
    TritonSharingBackend,
)
from specattn.backends.triton_mla import TritonMlaBackend
from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.testing import conformance
from specattn.testing.cases import share_prefixes
from specattn.testing.session import config_of, plan_of
from tests.churn import Churn, Groups
from tests.oracle import Case, check, make_tree_case
from tests.samples import kit
from tests.tiny import TinyDraft, attentive, dense_greedy

if TYPE_CHECKING:
    import pytest

    from specattn.testing.kit import Check

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CUDA = DEVICE.type == "cuda"


class LatentSharing(TritonMlaBackend):
    share_prefixes = True


# forwards that share nothing run the kernels of "triton", which has a suite of its own
WITHOUT = ("prompt_extend", "draft_lists", "window", "evicted", "deterministic", "same_", "all")


def checks() -> list[Check]:
    """The kit on a GPU, where forwards can share; in the interpreter what is about common slots."""
    options = {"validates": True, "evicts": True}
    if not CUDA:
        found = conformance("triton_sharing", DEVICE, "quick", **options)
        return [one for one in found if one.broken == "shared prefixes"]
    # float32 takes longest to compile: in each mode once
    exact = conformance("triton_sharing", DEVICE, dtypes=(torch.float32,), **options)
    half = (torch.float16, torch.bfloat16)
    found = [
        *conformance("triton_sharing", DEVICE, dtypes=half, **options),
        *(one for one in exact if one.broken == "dtypes"),
    ]
    return [one for one in found if not any(part in one.name for part in WITHOUT)]


@kit(checks())
def test_it_passes_the_kit(one: Check) -> None:
    one()


def case_of(**options: object) -> Case:
    case = make_tree_case([300, 290, 280], dtype=torch.float16, device=DEVICE, **options)
    return share_prefixes(case, [([0, 1, 2], 260)])


def first_tiles(bound: TritonBound) -> list[int]:
    return bound.kernel.tables.requests[:3, 2].tolist()


def test_forwards_of_a_step_are_matched_and_planned_in_a_launch_each(
    plan_launches: list[tuple[int, ...]],
) -> None:
    """Drafting, verification, and a layer with a window, which shares nothing."""
    cases = [case_of(q_len=4, mode="draft"), case_of(q_len=6), case_of(window_left=9, evict=False)]
    bounds = [TritonSharingBackend(config_of(case), DEVICE).bind(plan_of(case)) for case in cases]
    fill_all(bounds)
    assert plan_launches == [(2,), (1,)]
    # of 256 keys; in a window, its first
    block = bounds[0].kernel.tile.block_n
    assert [first_tiles(bound) for bound in bounds[:2]] == [[256 // block] * 3] * 2
    assert bounds[2].kernel.kernels.sharing is None
    for bound, case in zip(bounds, cases, strict=True):
        bound.run(case.q, case.k_cache, case.v_cache, case.out, case.lse)
        check(case, case.expected())


def test_it_is_off_unless_asked_for() -> None:
    case = case_of()
    bound = TritonBackend(config_of(case), DEVICE).bind(plan_of(case))
    bound.fill()
    assert first_tiles(bound) == [0, 0, 0]


def test_latent_layers_share_nothing() -> None:
    case = case_of(latent=True, heads=(4, 1), head_dim=80, v_head_dim=64)
    bound = LatentSharing(config_of(case), DEVICE).bind(plan_of(case))
    bound.fill()
    bound.run(case.q, case.k_cache, case.v_cache, case.out, case.lse)
    assert first_tiles(bound) == [0, 0, 0]
    check(case, case.expected())


def test_texts_do_not_depend_on_who_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests over one prompt come and go, and others between them."""
    monkeypatch.setattr("specattn.backends.triton.SHARE_FROM", 32)
    groups = Groups(monkeypatch)
    models = attentive(DEVICE), TinyDraft(device=DEVICE)
    prompt = [7 * i % 61 for i in range(100)]
    texts = [[*prompt, 5], [*prompt, 9, 3], [*prompt[:66], *prompt[:40]], [4, 8, 15]]
    config = SpecConfig(2, 2, 4, max_context_len=128, max_num_reqs=4)
    run = Engine(*models, config, backend="triton_sharing", buckets=[4])
    churn, ended = Churn(run, [Request(text, 8) for text in texts], 6), []
    churn.level = 4
    for _ in range(10):
        ended += churn.step()
        groups.look()
    for kind, result in (*ended, *churn.drop()):
        count = len(result.tokens)
        assert result.tokens == dense_greedy(models[0], texts[kind], count)
    assert churn.joins > 4
    assert 0 in groups.sizes
    assert len(groups.sizes) > 2
    assert run.table.num_free_rows == 4
