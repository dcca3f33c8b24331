"""One list and one packed mask per request, against lists of lists."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specattn.kernels.indices import KeySlots, fill_lists
from specattn.kernels.masks import pack_masks
from tests.implementations import EXAMPLES, by_each
from tests.kernels.tree_oracle import DEVICE
from tests.oracle import Case, make_tree_case

CANARY = 171

CASES = {
    "below_a_byte": {"lengths": [0, 0, 1], "q_len": 2},
    "many_programs": {"lengths": [1500], "q_len": 11},
    "padded": {"lengths": [600, 2], "q_len": 4, "pads": 3},
}


@st.composite
def forwards(draw):
    q_len, mode = draw(st.integers(1, 7)), draw(st.sampled_from(["tree", "chain", "any", "draft"]))
    steps = draw(st.integers(1, 4) | st.just(20))
    return {
        "lengths": draw(st.lists(st.integers(0, 70), min_size=1, max_size=4)),
        "q_len": q_len,
        "tail_len": q_len * steps if mode == "draft" else q_len + 3 * steps,
        "mode": mode,
        "pads": draw(st.integers(0, 2)),
        "seed": draw(st.integers(0, 99)),
    }


def tensors(
    case: Case, reach: int = 10_000
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """The case's arguments, and list and byte offsets with a trailing request without rows.

    Lists hold at most ``reach`` keys of the prefix.
    """
    args = case.args
    _, q_len, _ = args["tail_words"].shape
    keys = args["seq_lens"].clamp(max=reach) + args["tail_slots"].shape[1]
    lists = torch.zeros(len(keys) + 2, dtype=torch.int32)
    lists[1:-1] = keys.cpu().cumsum(0)
    lists[-1] = lists[-2]
    masks = torch.zeros_like(lists)
    masks[1:-1] = ((q_len * keys.cpu() + 7) // 8).cumsum(0)
    masks[-1] = masks[-2]
    return args, lists.to(DEVICE), masks.to(DEVICE)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a view with a row stride, as the draft steps' are."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] + 3)
    wide = torch.full(shape, CANARY, dtype=tensor.dtype, device=tensor.device)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


@settings(max_examples=EXAMPLES)
@given(forwards(), st.sampled_from([(-1, 10_000), (6, 10_000), (6, 6), (3, -1), (3, 0)]))
@example(CASES["below_a_byte"], (-1, 10_000))
@example(CASES["many_programs"], (-1, 10_000))
@example(CASES["padded"], (6, 6))
@by_each
def test_lists_are_the_prefix_then_the_tail(form, sight):
    """With a window, keys no query sees are left out by the host, or replaced."""
    window, reach = sight
    case = make_tree_case(**form, device=DEVICE)
    tail = case.args["tail_slots"].shape[1]
    args, lists, _ = tensors(case, max(reach, 1 - tail))
    out = torch.full((int(lists[-1]) + 5,), -CANARY, dtype=torch.int32, device=DEVICE)
    fill_lists(
        KeySlots(
            args["req_to_token"],
            args["req_pool_indices"],
            args["seq_lens"],
            strided(args["tail_slots"]),
        ),
        positions=strided(args["positions"]),
        kv_indptr=lists,
        kv_indices=out,
        window_left=window,
    )
    table, rows = args["req_to_token"].tolist(), args["req_pool_indices"].tolist()
    want = []
    for b, length in enumerate(args["seq_lens"].tolist()):
        slots = args["tail_slots"][b].tolist()
        far = int(args["positions"][b].min()) - window if window >= 0 else 0
        prefix = [s if p >= far else slots[-1] for p, s in enumerate(table[rows[b]][:length])]
        begin, end = lists[b : b + 2].tolist()
        want += (prefix + slots)[length + tail - (end - begin) :]
    assert out.tolist() == want + [-CANARY] * 5


def test_lists_without_a_tail_come_from_the_table_alone(implementation):
    """What a prompt reads: the table holds its new tokens too."""
    table = torch.randperm(60, device=DEVICE).int().view(3, 20)
    lists = torch.tensor([0, 7, 7, 27], dtype=torch.int32, device=DEVICE)
    out = torch.full((27,), -CANARY, dtype=torch.int32, device=DEVICE)
    fill_lists(
        KeySlots(
            table, torch.tensor([2, 0, 1], device=DEVICE), lists.diff(), table.new_empty(3, 0)
        ),
        positions=table.new_empty(3, 0).long(),
        kv_indptr=lists,
        kv_indices=out,
        window_left=-1,
    )
    assert out.tolist() == table[2, :7].tolist() + table[1].tolist()


def brute_force(case: Case, reach: int) -> list[int]:
    """The bytes of all masks, cell by cell."""
    a = {name: value.tolist() for name, value in case.args.items()}
    packed = []
    for b, prefix in enumerate(a["seq_lens"]):
        cells = []
        for i, here in enumerate(a["positions"][b]):
            where = list(range(prefix)) + a["tail_positions"][b]
            for column, there in list(enumerate(where))[max(prefix - reach, 0) :]:
                seen = column < prefix or (
                    a["tail_words"][b][i][(column - prefix) // 64] >> (column - prefix) % 64 & 1
                )
                near = case.window_left < 0 or 0 <= here - there <= case.window_left
                cells.append(bool(seen) and near)
        cells += [False] * (-len(cells) % 8)
        packed += [
            sum(on << bit for bit, on in enumerate(cells[at : at + 8]))
            for at in range(0, len(cells), 8)
        ]
    return packed


@settings(max_examples=EXAMPLES)
@given(forwards(), st.sampled_from([(-1, 10_000), (0, 0), (6, 10_000), (6, 6)]))
@example(CASES["below_a_byte"], (0, 0))
@example(CASES["many_programs"], (-1, 10_000))
@example(CASES["padded"], (6, 10_000))
@by_each
def test_masks_are_packed_from_words_and_positions(form, sight):
    window, reach = sight
    case = make_tree_case(**form, window_left=window, device=DEVICE)
    args, lists, masks = tensors(case, reach)
    out = torch.full((int(masks[-1]) + 5,), CANARY, dtype=torch.uint8, device=DEVICE)
    words = strided(args["tail_words"])
    pack_masks(
        kv_indptr=lists,
        mask_indptr=masks,
        seq_lens=args["seq_lens"],
        positions=strided(args["positions"]),
        tail_positions=strided(args["tail_positions"]),
        tail_words=words,
        mask=out,
        window_left=window,
    )
    assert out.tolist() == brute_force(case, reach) + [CANARY] * 5
