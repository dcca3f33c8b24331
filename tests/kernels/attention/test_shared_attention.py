"""Attention of requests that read common prefixes once, against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from specattn.kernels.attention.tiles import DeviceLimits, tile_config
from specattn.testing.cases import share_prefixes
from tests.kernels.attention.calls import attend, make_deterministic, make_kernel, plan, poison, run
from tests.oracle import LAYOUT, Case, check, make_csr_case, make_tree_case
from tests.recordings import recorded, refill
from tests.samples import compiled, sampled

if TYPE_CHECKING:
    from specattn.kernels.attention import TreeAttention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F16, FLOAT8 = torch.float16, torch.float8_e4m3fn
LEAST = 32
# requests, and the keys that all of them have in common
Groups = list[tuple[list[int], int]]


def make(lengths: list[int], groups: Groups, **options: Any) -> Case:
    form = {"dtype": LAYOUT, "device": DEVICE}
    return share_prefixes(make_tree_case(lengths, **form | options), groups)


def sharing(case: Case, **options: Any) -> TreeAttention:
    """Build kernels that share, with tables and workspace of nonsense."""
    kernel = make_kernel(case, share_from=LEAST, **options)
    poison(kernel)
    return kernel


def shared_keys(kernel: TreeAttention) -> list[int]:
    """Keys that each request of the last plan reads with others."""
    return (kernel.tables.requests[: kernel.batch, 2] * kernel.tile.block_n).tolist()


LENGTHS = [200, 150, 0, 130, 33, 140, 64, 129]
GROUPS: Groups = [([0, 3, 5, 7], 128), ([1, 6], 64)]
# what differs from trees of 4 nodes, 4 query and 2 KV heads of 32
CASES: dict[str, dict[str, Any]] = {
    "tree": {},
    "decode": {"q_len": 1, "mode": "chain"},
    "chain": {"q_len": 6, "mode": "chain"},
    "draft": {"q_len": 4, "tail_len": 12, "mode": "draft"},
    "padded": {"pads": 3},
    # of 16 rows each
    "rows_across_blocks": {"q_len": 3, "heads": (8, 2), "dtype": torch.float32},
    "two_m_tiles": {"q_len": 6, "heads": (8, 2), "dtype": torch.float32},
    "group_7": {"q_len": 3, "heads": (7, 1)},
    "any_bits": {"q_len": 5, "tail_len": 70, "mode": "any"},
    "cap": {"logit_cap": 2.0, "scale": 2.0},
    "sinks": {"sinks": torch.float32},
    "pages": {"page_size": 16},
    "head_80_v_48": {"head_dim": 80, "v_head_dim": 48, "pool_pad": 3},
    "float16": {"dtype": F16, "head_dim": 64, "q_len": 9},
    "float8": {"dtype": F16, "kv_dtype": FLOAT8, "kv_scales": (0.7, 1.9), "head_dim": 256},
    "float32": {"dtype": torch.float32},
}
# of those, what differs from another in numbers that kernels have as constants alone
NUMBERS = {"chain", "padded", "group_7", "pages"}


@pytest.mark.parametrize("name", compiled(CASES, without=NUMBERS))
def test_attention_over_shared_prefixes(name: str) -> None:
    """Beyond the workspace that is asked for, nothing is written."""
    case = make(LENGTHS, GROUPS, **CASES[name])
    memory = torch.full((1 << 24,), 255, dtype=torch.uint8, device=DEVICE)
    taken: list[int] = []

    def workspace(size: int) -> torch.Tensor:
        taken.append(size)
        return memory[:size]

    kernel = sharing(case, workspace=workspace)
    attend(kernel, case)
    check(case, case.expected())
    # two of the pair have to fit where one does, and their keys have to fill a tile
    fit = 2 * kernel.q_len * kernel.group <= kernel.kernels.sharing.tile_rows
    pair = 64 if fit and kernel.tile.block_n <= 64 else 0
    keys = [128, pair, 0, 128, 0, 128, pair, 128]
    assert shared_keys(kernel) == keys + [0] * (kernel.batch - len(keys))
    assert (memory[taken[-1] :] == 255).all()


@pytest.mark.parametrize("ctas", [1, 24])
def test_entries_are_cut_like_requests(ctas: int) -> None:
    """A group's keys in one split, and in more than are merged at a time."""
    form = {"q_len": 3, "heads": (2, 1), "head_dim": 16, "dtype": torch.float32}
    case = make([400, 390, 401], [([0, 1, 2], 384)], **form)
    kernel = sharing(case)
    kernel = sharing(case, tile=replace(kernel.tile, ctas_per_sm=ctas))
    attend(kernel, case, lse=False)
    assert kernel.tables.shares[0, 1] > (8 if ctas > 1 else 0)
    check(case, case.expected(), lse=False)


@pytest.mark.parametrize("mode", ["tree", "draft"])
def test_groups_change_between_replays(mode: str) -> None:
    """They form, grow, swap and dissolve; so do the batch and its padding."""
    room = {
        "width": 260,
        "slots": 1200,
        "q_len": 4,
        "mode": mode,
        "pads": 1,
        "dtype": torch.float32,
    }
    room["tail_len"] = 8 if mode == "draft" else 4
    batches: list[tuple[list[int], Groups, list[int]]] = [
        ([1, 1, 1, 1], [], [0, 0, 0, 0]),
        ([250, 200, 130, 65], [([0, 2], 128), ([1, 3], 64)], [128, 64, 128, 64]),
        ([65, 200, 130, 200], [([1, 2, 3], 100)], [0, 96, 96, 96]),
        ([250, 250, 250, 250], [([0, 1, 2, 3], 250)], [224, 224, 224, 224]),
        ([250, 250, 250, 250], [], [0, 0, 0, 0]),
        ([0, 40, 0, 40], [([1, 3], 33)], [0, 32, 0, 32]),
    ]
    cases = [make(n, groups, seed=i, **room) for i, (n, groups, _) in enumerate(batches)]
    live = make(*batches[0][:2], **room)
    kernel = sharing(live)
    replay = recorded(lambda: attend(kernel, live))
    for case, (*_, keys) in zip(cases, batches, strict=True):
        refill(live, case)
        replay()
        assert shared_keys(kernel) == [*keys, 0]
        check(live, case.expected())


def test_requests_without_common_prefixes_have_the_bits_of_no_sharing() -> None:
    case = make([200, 33, 0, 130], [], q_len=5)
    kernel = sharing(case)
    attend(kernel, case)
    check(case, case.expected())
    out, lse = case.out.clone(), case.lse.clone()
    attend(make_kernel(case, tile=kernel.tile), case)
    assert torch.equal(out, case.out)
    assert torch.equal(lse, case.lse)


REFUSED: dict[str, dict[str, Any]] = {
    "window": {"window_left": 40},
    "one_request": {},
    "deterministic": {},
    "lists": {},
}


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_shared_where_that_is_not_served(name: str) -> None:
    """And all else is as without."""
    lengths, build = [130, 140], make_kernel
    options = {"q_len": 1, "mode": "chain", "heads": (2, 1), "head_dim": 16}
    if name == "lists":
        case = make_csr_case([130, 140], heads=(2, 1), head_dim=16, device=DEVICE)
    else:
        lengths = lengths[:1] if name == "one_request" else lengths
        case = make(lengths, [(list(range(len(lengths))), 128)], **options | REFUSED[name])
    if name == "deterministic":
        build = make_deterministic
    kernel = build(case, share_from=LEAST)
    assert kernel.kernels.sharing is None
    attend(kernel, case)
    check(case, case.expected())


def test_large_batches_share_nothing() -> None:
    case = make_tree_case([5, 6], device=DEVICE)
    assert make_kernel(case, share_from=LEAST, batch=256).kernels.sharing is not None
    assert make_kernel(case, share_from=LEAST, batch=257).kernels.sharing is None


# lengths, groups, and what differs from bfloat16 trees of 8 nodes, 32 query and 8 KV heads of 128
BIG: dict[str, tuple[list[int], Groups, dict[str, Any]]] = {
    "decode": (
        [1030 + 7 * b for b in range(32)],
        [(list(range(32)), 1025)],
        {"q_len": 1, "mode": "chain"},
    ),
    "verify": ([1300, 900, 700, 0, 640, 2500], [([0, 2, 4], 640), ([1, 5], 515)], {}),
    "few": ([3000, 2900, 2800], [([0, 1, 2], 2700)], {}),
    "two_m_tiles": ([1600] * 4, [([0, 1, 2, 3], 1500)], {"q_len": 40}),
    "draft": ([700] * 4, [([0, 1, 2, 3], 600)], {"mode": "draft", "tail_len": 72}),
    "group_7": ([700] * 5, [([0, 1, 2, 3, 4], 600)], {"heads": (14, 2), "q_len": 5}),
    "head_64": ([700] * 4, [([0, 1, 2, 3], 600)], {"head_dim": 64, "heads": (6, 2)}),
    "head_256": ([700] * 4, [([0, 1, 2, 3], 600)], {"head_dim": 256, "heads": (8, 2)}),
    "pages": ([700] * 4, [([0, 1, 2, 3], 640)], {"page_size": 16, "q_len": 20}),
    "cap": ([700] * 4, [([0, 1, 2, 3], 600)], {"logit_cap": 30.0}),
    "sinks": ([700] * 4, [([0, 1, 2, 3], 600)], {"sinks": torch.float32}),
    "float16": ([700] * 4, [([0, 1, 2, 3], 600)], {"dtype": F16}),
    "float8": ([700] * 4, [([0, 1, 2, 3], 600)], {"kv_dtype": FLOAT8, "kv_scales": (0.7, 1.9)}),
}


# cases that either way to serve them has a branch for, and those that one is enough for
BOTH, TRITON = {"decode", "two_m_tiles", "float8"}, {"few", "group_7", "cap", "float16"}
WAYS = [[name for name in BIG if name not in TRITON], [*BOTH, *TRITON]]


@pytest.mark.gpu
@sampled(lambda name, way: list(BIG)[name] in WAYS[way], name=BIG.keys(), gluon=[True, False])
def test_attention_over_shared_prefixes_at_size(name: str, gluon: bool) -> None:
    """By the tile of the device, and by one of Triton; later layers may prefetch."""
    lengths, groups, form = BIG[name]
    defaults = {"q_len": 8, "heads": (32, 8), "head_dim": 128, "dtype": torch.bfloat16}
    case = make(lengths, groups, **defaults | form)
    options: dict[str, Any] = {}
    if not gluon:
        rows, width = case.layout.q_len * case.q.shape[1], case.q.shape[2]
        options["tile"] = tile_config(
            max(64, rows // case.k_cache.shape[1]),
            width,
            width,
            case.k_cache.dtype,
            len(lengths),
            DeviceLimits.of(case.q.device),
        )
    kernel = sharing(case, **options)
    expected = case.expected()
    plan(kernel, case)
    assert max(shared_keys(kernel)) > 256
    for prefetch in (False, True, True):
        case.clear()
        layer = kernel if not prefetch else kernel.for_layer(None, prefetch=True)
        run(layer, case)
        check(case, expected)


@pytest.mark.gpu
def test_one_graph_serves_all_groups() -> None:
    """Replays of one recording, by the kernel of the device."""
    form = {"width": 2200, "slots": 9000, "q_len": 8, "heads": (32, 8), "head_dim": 128}
    form |= {"dtype": torch.bfloat16, "pads": 1}
    batches: list[tuple[list[int], Groups]] = [
        ([2000, 2000, 1000, 1900], [([0, 1, 3], 1900)]),
        ([2000, 2000, 1000, 1900], []),
        ([700, 2000, 600, 1900], [([1, 3], 1500), ([0, 2], 600)]),
        ([0, 0, 0, 0], []),
        ([1500] * 4, [([0, 1, 2, 3], 1500)]),
    ]
    live = make([1] * 4, [], **form)
    kernel = make_kernel(live, share_from=256)
    replay = recorded(lambda: attend(kernel, live))
    for seed, (lengths, groups) in enumerate(batches):
        case = make(lengths, groups, seed=seed, **form)
        refill(live, case)
        replay()
        assert (max(shared_keys(kernel)) > 0) == bool(groups)
        check(live, case.expected())


@pytest.mark.gpu
def test_batches_share_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a batch's own results end is no constant of a kernel."""
    import triton

    met: list[str] = []

    def listen(*, src: Any, **_: Any) -> None:
        met.append(src.name)

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    for batch in (12, 16):
        case = make([700] * batch, [(list(range(batch)), 600)], q_len=3, heads=(14, 2))
        attend(sharing(case), case)
        check(case, case.expected())
        assert (len(met) > 0) == (batch == 12)
        met.clear()


def test_errors_name_the_argument() -> None:
    case = make([130, 140], [])
    with pytest.raises(ValueError, match="share_from must be 0"):
        make_kernel(case, share_from=-1)
    kernel = sharing(case)
    lens, rows, table = (
        case.args[name] for name in ("seq_lens", "req_pool_indices", "req_to_token")
    )
    for given, got in ((None, "None"), (table.long(), "torch.int64")):
        with pytest.raises(ValueError, match=f"^table must be int32 .* share_from, got {got}$"):
            kernel.plan(lens, rows, table.stride(0), table=given)
    plan(kernel, case)
