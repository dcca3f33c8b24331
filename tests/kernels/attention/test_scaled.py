"""Attention whose merge quantises heads: bits of a quantiser of its own, numbers of the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from specattn.kernels.fused.fp8 import RowsFormat, scale_rows
from tests.implementations import using
from tests.kernels.attention.calls import (
    TAIL,
    attend,
    make_deterministic,
    make_kernel,
    plan,
    poison,
)
from tests.oracle import LAYOUT, Case, make_csr_case, make_tree_case, oracle_csr, oracle_tree
from tests.recordings import recorded, refill
from tests.samples import half, on_cpu

if TYPE_CHECKING:
    from specattn.kernels.attention import TreeAttention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# prefix lengths; what differs from 3 nodes and 4 query heads; CTAs per multiprocessor
CASES: dict[str, tuple[list[int], dict[str, Any], int]] = {
    "long_beside_short": ([700, 3, 64, 0, 17], {}, 16),
    "many_partials": ([900, 1], {"heads": (2, 1)}, 32),
    "none_is_cut": ([5, 64, 33], {"q_len": 1, "mode": "chain"}, 1),
    "one_request": ([130], {"heads": (7, 1), "q_len": 6}, 8),
    "head_192_v_128": ([260, 20], {"head_dim": 192}, 4),
    "window": ([400, 30, 1], {"window_left": 17}, 8),
    "blind_rows": ([0, 0], {"q_len": 7, "tail_len": 70, "mode": "any", "seed": 3}, 8),
    "m_tiles": ([300, 65], {"q_len": 20, "heads": (8, 1)}, 64),
}


@pytest.fixture
def new_is_nan(monkeypatch) -> None:
    """What is not written is NaN."""

    def poisoned(like: torch.Tensor, *shape: int, **how: Any) -> torch.Tensor:
        value = torch.nan if how.get("dtype", like.dtype).is_floating_point else -7
        return like.new_full(shape, value, **how)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


def make(name: str) -> tuple[Case, TreeAttention]:
    lengths, options, ctas = CASES[name]
    options = {"dtype": LAYOUT, "head_dim": 128, "v_head_dim": 128, "q_len": 3} | options
    case = make_tree_case(lengths=lengths, **options, device=DEVICE)
    return case, make_kernel(case, ctas=ctas)


def scaled(kernel: TreeAttention, case: Case, how: RowsFormat) -> Any:
    names = ("kv_indices",) if case.kind == "lists" else ("req_to_token", *TAIL)
    indices, *tail = (case.args[name] for name in names)
    poison(kernel)
    plan(kernel, case)
    with using("triton"):
        assert kernel.quantises(how)
        inputs = dict(zip(TAIL, tail, strict=True)) if tail else {}
        return kernel.scaled(case.q, case.k_cache, case.v_cache, how, indices=indices, **inputs)


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.double().cpu(), want.double().cpu()
    return float((got - want).norm() / want.norm())


def check(found: Any, case: Case, kernel: TreeAttention, exact: torch.Tensor) -> None:
    attend(kernel, case, lse=False)
    with using("triton"):
        want = scale_rows(case.out.flatten(1), RowsFormat(case.q.shape[1], len(found.values)))
    assert (len(found), found.dtype) == (len(case.q), case.q.dtype)
    if DEVICE == "cpu":
        assert found.scale.equal(want.scale)
        bits, same = (one.values[:, : len(want)].view(torch.uint8) for one in (found, want))
        assert bits.equal(same)
    # compiled, another kernel may round sums another way
    assert off(found.restored(), want.restored()) < 1e-2
    for term, scale in enumerate(found.scales):
        assert scale[: len(found)].equal(found.scale / 16**term)
    limit = 5e-2 if len(found.values) == 1 else 3e-3
    assert off(found.restored(), exact.flatten(1)) < limit


@on_cpu(half, "name", "terms")
@pytest.mark.usefixtures("new_is_nan")
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_heads_are_quantised_as_they_are_rounded(name: str, terms: int) -> None:
    """Of requests that are cut, and of those that are not."""
    case, kernel = make(name)
    found = scaled(kernel, case, RowsFormat(case.q.shape[1], terms))
    check(found, case, kernel, oracle_tree(case)[0])


@pytest.mark.usefixtures("new_is_nan")
def test_lists() -> None:
    case = make_csr_case(
        [300, 1, 40], heads=(4, 2), head_dim=128, v_head_dim=128, dtype=LAYOUT, device=DEVICE
    )
    kernel = make_kernel(case, ctas=4)
    check(scaled(kernel, case, RowsFormat(4)), case, kernel, oracle_csr(case)[0])


def test_one_recording_serves_every_length() -> None:
    """Which requests are cut changes from replay to replay."""
    form = {"q_len": 4, "heads": (4, 2), "head_dim": 128, "dtype": LAYOUT, "device": DEVICE}
    batches = [400, 3, 0, 70], [0, 0, 0, 0], [64, 65, 63, 1], [150, 150, 150, 150]
    live, *cases = (
        make_tree_case(batch, width=420, slots=800, seed=seed, **form)
        for seed, batch in enumerate(([1, 1, 1, 1], *batches))
    )
    kernel, found = make_kernel(live, ctas=8), []
    replay = recorded(lambda: found.append(scaled(kernel, live, RowsFormat(4))))
    for case in cases:
        refill(live, case)
        replay()
        assert off(found[-1].restored(), oracle_tree(case)[0].flatten(1)) < 5e-2


def test_other_formats_and_kernels_leave_it_to_the_product() -> None:
    case, kernel = make("long_beside_short")
    with using("triton"):
        assert kernel.quantises(RowsFormat(4))
        # a scale per row; heads of two groups, or of a part of one
        assert not kernel.quantises(RowsFormat(1))
        assert not make_deterministic(case).quantises(RowsFormat(4))
        assert not make_kernel(case, share_from=64).quantises(RowsFormat(4))
        for size in (64, 256):
            other = make_tree_case(
                lengths=[40], dtype=LAYOUT, head_dim=size, v_head_dim=size, device=DEVICE
            )
            assert not make_kernel(other).quantises(RowsFormat(4 * size // 128))
