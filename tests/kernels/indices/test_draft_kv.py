"""The draft steps' KV lists against lists of lists, and against the golden vectors."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specattn.kernels.indices import KeySlots, draft_kv_width, fill_draft_kv, fill_draft_tails
from tests.implementations import EXAMPLES, by_each
from tests.kernels.tree_oracle import DEVICE, to_word

CANARY = -99


class Case:
    """Requests with scattered slots, and branches that descend from random beams."""

    def __init__(self, rng, lens, topk, steps, max_len, *, parents=None):
        batch, self.topk, self.steps, self.max_len = len(lens), topk, steps, max_len
        self.lens = lens
        self.rows = rng.sample(range(1, batch + 4), batch)
        slots = rng.sample(range(1, 10_000), (batch + 4) * (max_len if max_len < 99 else 9))
        if max_len >= 99:
            slots = [rng.randrange(1, 2**31) for _ in range((batch + 4) * max_len)]
        self.table = [slots[i * max_len : (i + 1) * max_len] for i in range(batch + 4)]
        self.branch_slots = [
            [[rng.randrange(1, 2**31) for _ in range(topk)] for _ in range(steps)] for _ in lens
        ]
        # beam k of step s extends beam parents[s][k] of step s - 1
        self.parents = parents or [
            [[rng.randrange(topk) for _ in range(topk)] for _ in range(steps)] for _ in lens
        ]

    def path(self, req, step, branch):
        nodes = [(step, branch)]
        while nodes[-1][0]:
            step, branch = nodes[-1]
            nodes.append((step - 1, self.parents[req][step][branch]))
        return nodes[::-1]

    def words(self):
        count = -(-self.steps * self.topk // 64)
        mask = [
            [
                [
                    sum(1 << s * self.topk + k for s, k in self.path(b, step, branch))
                    for branch in range(self.topk)
                ]
                for step in range(self.steps)
            ]
            for b in range(len(self.lens))
        ]
        return [
            [[[to_word(m >> 64 * w & 2**64 - 1) for w in range(count)] for m in row] for row in req]
            for req in mask
        ]

    def expected(self, step):
        lists = []
        for b, length in enumerate(self.lens):
            for k in range(self.topk):
                tail = [self.branch_slots[b][s][x] for s, x in self.path(b, step, k)]
                lists.append(self.table[self.rows[b]][:length] + tail)
        return lists

    def tensors(self, extra=3):
        batch = len(self.lens)
        width = batch * self.topk * (self.max_len + self.steps)
        kwargs = {"dtype": torch.int32, "device": DEVICE}
        # canaries between the rows, which are views of wider storage
        indptr = torch.full((self.steps, batch * self.topk + 1 + extra), CANARY, **kwargs)
        indices = torch.full((self.steps, width + extra), CANARY, **kwargs)
        drafted = self.steps * self.topk
        window = torch.full((batch, drafted + extra), CANARY, **kwargs)
        slots = window[:, :drafted].unflatten(1, (self.steps, self.topk))
        slots.copy_(torch.tensor(self.branch_slots).view(slots.shape))
        keys = KeySlots(
            torch.tensor(self.table, **kwargs),
            torch.tensor(self.rows, device=DEVICE),
            torch.tensor(self.lens, **kwargs),
            slots,
        )
        lists = {
            "kv_indptr": indptr[:, : batch * self.topk + 1],
            "kv_indices": indices[:, :width],
        }
        words = torch.tensor(self.words(), device=DEVICE)
        return keys, words, lists, indptr, indices


def check(case, indptr, indices):
    for step in range(case.steps):
        lists = case.expected(step)
        offsets = [0]
        for row in lists:
            offsets.append(offsets[-1] + len(row))
        flat = [slot for row in lists for slot in row]
        got = indices[step].tolist()
        assert indptr[step].tolist()[: len(offsets)] == offsets
        assert got[: len(flat)] == flat
        assert set(got[len(flat) :]) <= {CANARY}
        assert set(indptr[step].tolist()[len(offsets) :]) <= {CANARY}


@settings(max_examples=EXAMPLES)
@given(
    lens=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    topk=st.integers(1, 10),
    steps=st.integers(1, 9),
    room=st.integers(0, 4),
)
@example([1030, 3, 2047], 2, 2, 3)
@example([*range(8), *range(122)], 1, 1, 1)
@by_each
def test_all_steps_in_one_call(lens, topk, steps, room):
    case = Case(random.Random(topk), lens, topk, steps, max(*lens, 1) + room)
    keys, words, lists, indptr, indices = case.tensors()
    fill_draft_kv(keys, words, **lists)
    check(case, indptr, indices)


def test_tails_as_beams_become_known(implementation):
    """Lengths first, ancestors step by step: the end state is that of filling all at once."""
    case = Case(random.Random(5), [4, 0, 7], 3, 4, 9)
    keys, words, lists, indptr, indices = case.tensors()
    partial = torch.zeros_like(words)
    fill_draft_kv(keys, partial, **lists)
    for step in range(4):
        partial[:, step] = words[:, step]
        fill_draft_tails(step, keys, partial, **lists)
        flat = [slot for row in case.expected(step) for slot in row]
        assert indices[step, : len(flat)].tolist() == flat
    check(case, indptr, indices)


def test_golden_vectors(implementation):
    """K = 2, S = 3, L = [3, 5]: slots are columns, branch k of step s at L + 3 k + s."""
    case = Case(random.Random(0), [3, 5], 2, 3, 12)
    case.table = [list(range(12))] * 6
    case.branch_slots = [[[n + 3 * k + s for k in range(2)] for s in range(3)] for n in (3, 5)]
    case.parents = [[[0, 0], [0, 0], [0, 0]]] * 2
    keys, words, lists, _, _ = case.tensors()
    fill_draft_kv(keys, words, **lists)
    indptr, indices = lists.values()
    assert indptr.tolist() == [[0, 4, 8, 14, 20], [0, 5, 10, 17, 24], [0, 6, 12, 20, 28]]
    # request 0, step 1: both beams are children of beam 0
    assert indices[1, :10].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 7]
    case.parents = [[[0, 0], [0, 1], [0, 1]]] * 2
    keys, words, lists, _, _ = case.tensors()
    fill_draft_kv(keys, words, **lists)
    own = [lists["kv_indices"][2, end - 3 : end].tolist() for end in (6, 12, 20, 28)]
    assert own == [[3, 4, 5], [6, 7, 8], [5, 6, 7], [8, 9, 10]]


def test_golden_pages_of_four(implementation):
    case = Case(random.Random(0), [3, 5], 2, 3, 16)
    case.table = [list(range(16))] * 6
    case.branch_slots = [
        [[c + s for c in columns] for s in range(3)] for columns in ([3, 11], [5, 9])
    ]
    case.parents = [[[0, 0], [0, 1], [0, 1]]] * 2
    keys, words, lists, _, _ = case.tensors()
    fill_draft_kv(keys, words, **lists)
    tails = [lists["kv_indices"][2, end - 3 : end].tolist() for end in (6, 12, 20, 28)]
    assert tails == [[3, 4, 5], [11, 12, 13], [5, 6, 7], [9, 10, 11]]


def test_wrong_popcounts_stay_inside_their_branch(implementation):
    """Padding has one bit per node; too many bits must not run into the next branch."""
    case = Case(random.Random(1), [2, 3], 3, 3, 8)
    keys, words, lists, _, indices = case.tensors()
    words[0] = 0
    words[1] = -1
    fill_draft_kv(keys, words, **lists)
    slots = case.branch_slots
    for step in range(3):
        row, at = indices[step].tolist(), 0
        for req, length in enumerate(case.lens):
            for _ in range(3):
                first = [x for level in slots[1] for x in level][: step + 1]
                tail = first if req else [0] * (step + 1)
                prefix = case.table[case.rows[req]][:length]
                assert row[at : at + length + step + 1] == prefix + tail
                at += length + step + 1


def test_r01_full_rows_fit(implementation):
    """sglang#27338: every request at the context limit, topk copies of each prefix."""
    case = Case(random.Random(2), [9, 9, 9], 4, 3, 9)
    keys, words, lists, indptr, indices = case.tensors(extra=5)
    fill_draft_kv(keys, words, **lists)
    check(case, indptr, indices)
    assert indptr[-1, 12] == lists["kv_indices"].shape[1]


def test_r01_narrow_rows_are_refused_before_any_write(implementation):
    case = Case(random.Random(2), [1, 2], 2, 2, 9)
    keys, words, lists, indptr, indices = case.tensors()
    with pytest.raises(ValueError, match=r"kv_indices must be \[2, 44\]"):
        fill_draft_kv(keys, words, **lists | {"kv_indices": lists["kv_indices"][:, :-1]})
    with pytest.raises(ValueError, match=r"kv_indptr must be \[2, 5\]"):
        fill_draft_kv(keys, words, **lists | {"kv_indptr": lists["kv_indptr"][:, :-1]})
    with pytest.raises(ValueError, match="words must have a bit for each of 4 nodes"):
        fill_draft_kv(keys, words[..., :0], **lists)
    with pytest.raises(ValueError, match=r"tail must be \[2, 2, 2\]"):
        fill_draft_kv(keys._replace(tail=keys.tail[:, :1]), words, **lists)
    assert (indptr == CANARY).all()
    assert (indices == CANARY).all()


def test_width_overflow_is_an_error(implementation):
    assert draft_kv_width(3, 4, 100, 5) == 1260
    with pytest.raises(ValueError, match="int32"):
        draft_kv_width(2048, 8, 131072, 4)


def test_r20_lengths_out_of_range_are_clamped(implementation):
    """Negative and overlong lengths of dead rows give lists inside the table."""
    case = Case(random.Random(3), [-3, 4, 50], 2, 2, 6)
    keys, words, lists, indptr, indices = case.tensors()
    fill_draft_kv(keys, words, **lists)
    for step in range(2):
        fill_draft_tails(step, keys, words, **lists)
    case.lens = [0, 4, 6]
    check(case, indptr, indices)
