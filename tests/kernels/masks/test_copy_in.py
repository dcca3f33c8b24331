"""An engine's rows, lengths, slots and masks as a plan's inputs, against plain Python."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specattn.kernels.masks import PlanInputs, Window, copy_in_prompts, copy_in_rows, copy_in_steps
from specattn.masks import full_mask, packed_mask, qlen_mask
from tests.implementations import EXAMPLES, by_each
from tests.kernels.tree_oracle import DEVICE, POISON, poisoned, random_tree, to_word
from tests.recordings import recorded

CONTEXT = 60
INTS = [torch.int32, torch.int64]


def tensor(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


class Host:
    """Requests of an engine; request 1 is padding, and the last one ends at its table's end."""

    def __init__(self, batch: int, n: int, seed: int = 0, context: int = CONTEXT) -> None:
        rng = random.Random(seed)
        self.batch, self.n = batch, n
        self.table = poisoned(batch + 2, context, dtype=torch.int32, gap=3)
        numbers = torch.randperm(1 << 16, device=DEVICE)[: self.table.numel()]
        self.table.copy_(numbers.view(self.table.shape))
        self.rows = rng.sample(range(1, batch + 2), batch)
        self.prefix = [rng.randrange(context - n + 1) for _ in range(batch)]
        if batch > 1:
            self.rows[1] = self.prefix[1] = 0
            self.prefix[-1] = context - n + 1
        self.trees = [random_tree(rng, n, 9) for _ in range(batch)]
        slots = rng.sample(range(1 << 16), batch * n)
        self.slots = [slots[b * n : (b + 1) * n] for b in range(batch)]
        self.outs = {
            "rows": poisoned(batch),
            "seq_lens": poisoned(batch, dtype=torch.int32),
            "slots": poisoned(batch, n, dtype=torch.int32, gap=2),
            "store": poisoned(batch, n, dtype=torch.int32, gap=1),
            "positions": poisoned(batch, n, gap=4),
            "words": poisoned(batch, n, -(-n // 64)),
        }

    @property
    def words(self) -> torch.Tensor:
        return tensor([tree.words(-(-self.n // 64)) for tree in self.trees])

    def mask(self, kind: str) -> torch.Tensor:
        """The trees' masks, by the library's own writer of them."""
        lens = tensor(self.prefix, torch.int32)
        if kind == "qlen":
            return qlen_mask(self.words)
        if kind == "qlen_bits":
            return self.words.view(torch.uint8)
        return (full_mask if kind == "full" else packed_mask)(self.words, lens)

    def copy_in(self, mask=None, kind="qlen", counted=0, dtype=torch.int64, **changes):
        made = {
            "rows": lambda: tensor(self.rows, dtype),
            "seq_lens": lambda: tensor([length + counted for length in self.prefix], dtype),
            "slots": lambda: tensor(self.slots, dtype).view(self.batch, self.n),
        }
        given = {name: make() for name, make in made.items() if name not in changes}
        given |= {
            "positions": None,
            "mask": mask,
            "kind": kind,
            "counted": counted,
            "req_to_token": self.table,
        }
        outs = {name: changes.pop(name) for name in [*changes] if name.startswith("out_")}
        outs = self.outs | {name[4:]: value for name, value in outs.items()}
        copy_in_rows(**given | {"out": PlanInputs(**outs)} | changes)

    def check(self, words=None, depths=None, slots=None, reads=None):
        found = {name: out.tolist() for name, out in self.outs.items()}
        assert found["rows"] == self.rows
        assert found["seq_lens"] == self.prefix
        slots = self.slots if slots is None else slots
        assert found["store"] == slots
        reads = [[max(slot, 0) for slot in row] for row in slots] if reads is None else reads
        assert found["slots"] == reads
        assert found["words"] == (self.words.tolist() if words is None else words)
        depths = [tree.depths() for tree in self.trees] if depths is None else depths
        assert found["positions"] == [
            [length + depth for depth in row]
            for length, row in zip(self.prefix, depths, strict=True)
        ]
        for out in self.outs.values():
            if out._base is not None and out.dim() == 2:
                assert (out._base[:, self.n :] == POISON).all()


def chain(n: int) -> list[list[int]]:
    return [
        [to_word((2 << i) - 1 >> 64 * w & 2**64 - 1) for w in range(-(-n // 64))] for i in range(n)
    ]


KINDS = ["qlen", "qlen_bits", "full", "full_bits"]
# of a byte, of a word, and of several
NODES = st.integers(1, 40) | st.sampled_from([63, 64, 65, 100, 130])


@settings(max_examples=EXAMPLES)
@given(
    batch=st.integers(1, 4),
    n=NODES,
    kind=st.sampled_from(KINDS),
    counted=st.sampled_from([0, 1, 5]),
    dtype=st.sampled_from(INTS),
    seed=st.integers(0, 999),
)
@by_each
def test_trees_come_from_masks_of_every_kind(batch, n, kind, counted, dtype, seed):
    host = Host(batch, n, seed, context=200)
    host.copy_in(host.mask(kind), kind, counted, dtype)
    host.check()


@pytest.mark.parametrize("kind", ["full", "full_bits"])
def test_masks_of_many_requests_begin_where_the_one_before_ends(implementation, kind):
    host = Host(300, 2)
    host.copy_in(host.mask(kind), kind)
    host.check()


@pytest.mark.parametrize("counted", [0, 3])
def test_without_a_mask_rows_are_causal(implementation, counted):
    for n in (1, 3, 40, 70):
        host = Host(2, n, context=99)
        host.copy_in(None, "full", counted)
        host.check([chain(n)] * 2, [range(n)] * 2)


def test_padding_shorter_than_its_new_tokens_has_no_prefix(implementation):
    host = Host(3, 4)
    host.prefix = [5, 0, 0]
    host.copy_in(counted=4, seq_lens=tensor([9, 1, 0]))
    host.check([chain(4)] * 3, [range(4)] * 3)


def test_rows_that_see_the_prefix_alone(implementation):
    host = Host(3, 4)
    host.copy_in(kind="prefix")
    host.check([[[0]] * 4] * 3, [[0] * 4] * 3, reads=[[0] * 4] * 3)


@pytest.mark.parametrize("dtype", INTS)
def test_positions_and_slots_of_any_strides(implementation, dtype):
    """Transposed, as an order branch by branch is; slots below 0 read padding."""
    host = Host(3, 6)
    host.slots[2][1:4] = -1, -5, -1
    places = [[7 * b + i for i in range(6)] for b in range(3)]
    columns = tensor(host.slots, dtype).T.contiguous()
    host.copy_in(slots=columns.T, positions=tensor(places, dtype).T.contiguous().T)
    depths = [[at - host.prefix[b] for at in row] for b, row in enumerate(places)]
    host.check([chain(6)] * 3, depths)


def test_without_slots_they_are_the_tables(implementation):
    host = Host(4, 5)
    host.copy_in(slots=None)
    held = host.table.tolist()
    slots = [
        (held[row] + [0] * 5)[length : length + 5]
        for row, length in zip(host.rows, host.prefix, strict=True)
    ]
    host.check([chain(5)] * 4, [range(5)] * 4, slots)


def test_a_row_sees_itself_whatever_the_mask_says(implementation):
    host = Host(2, 3)
    host.copy_in(torch.zeros(2 * 3 * 3 + 50, dtype=torch.bool, device=DEVICE))
    host.check([[[1], [2], [4]]] * 2, [[0] * 3] * 2)


def test_any_number_is_visible(implementation):
    """A mask of bytes; bits past the nodes mean nothing."""
    host = Host(2, 5)
    host.copy_in(host.mask("qlen").to(torch.uint8) * 7)
    host.check()
    bits = host.mask("qlen_bits")[..., :1] | 0b11100000
    host.copy_in(bits, "qlen_bits")
    host.check()


def test_a_mask_that_ends_early_hides_what_is_not_there(implementation):
    """Lengths of padding may point past the buffer: nothing is read there."""
    host = Host(2, 3)
    host.prefix = [4, 50]
    mask = torch.ones(60, dtype=torch.bool, device=DEVICE)
    host.copy_in(mask, "full", slots=tensor(host.slots))
    # of request 1, whose rows begin at 21 and 53 cells apart, no cell is there
    host.check([[[7]] * 3, [[1], [2], [4]]], [[2] * 3, [0] * 3])


def test_a_recorded_copy_follows_its_tensors():
    first = Host(3, 7)
    given = {
        "rows": tensor(first.rows),
        "seq_lens": tensor(first.prefix),
        "slots": tensor(first.slots),
    }
    mask = torch.zeros(3 * 7 * (CONTEXT + 7), dtype=torch.bool, device=DEVICE)
    replay = recorded(lambda: first.copy_in(mask, "full", **given))
    for seed in range(3):
        host = Host(3, 7, seed)
        host.outs = first.outs
        for name, value in (
            ("rows", host.rows),
            ("seq_lens", host.prefix),
            ("slots", host.slots),
        ):
            given[name].copy_(tensor(value))
        drawn = host.mask("full")
        mask[: len(drawn)] = drawn
        replay()
        host.check()


def test_no_request_is_nothing_to_do(implementation):
    host = Host(0, 3)
    host.copy_in()
    steps = torch.zeros(0, 2, 3, dtype=torch.int32, device=DEVICE)
    copy_in_steps(
        tensor([]),
        tensor([]),
        None,
        counted=0,
        req_to_token=host.table,
        out=PlanInputs(
            tensor([]),
            tensor([], torch.int32),
            steps,
            steps,
            steps.long(),
            steps[..., None].long(),
        ),
    )


def test_others_are_refused_by_name(implementation):
    host = Host(2, 3)
    cells = torch.zeros(18, dtype=torch.bool, device=DEVICE)
    for message, changes in (
        ("rows must be", {"rows": tensor([1])}),
        ("seq_lens must be", {"seq_lens": tensor([1.0, 2.0], torch.float32)}),
        ("seq_lens must be", {"seq_lens": tensor([1, 2], torch.int16)}),
        ("slots must be", {"slots": tensor(host.slots)[:, :2]}),
        ("positions must be", {"positions": tensor(host.slots, torch.float32)}),
        ("kind must be 'qlen' or", {"kind": "dense"}),
        ("mask must be None with kind 'prefix'", {"kind": "prefix", "mask": cells}),
        ("mask must be torch.bool or torch.uint8", {"mask": cells.int()}),
        ("mask must be torch.uint8", {"mask": cells, "kind": "full_bits"}),
        ("at least 18 numbers", {"mask": cells[:17]}),
        ("at least 18 numbers", {"mask": cells[:17], "kind": "full"}),
        ("mask must be contiguous", {"mask": cells.view(2, 9).T}),
        ("words must be contiguous", {"out_words": poisoned(2, 3, 2)[..., ::2]}),
        ("slots must be dense", {"out_slots": poisoned(2, 6, dtype=torch.int32)[:, ::2]}),
    ):
        with pytest.raises(ValueError, match=message):
            host.copy_in(**{"kind": "qlen", "mask": None} | changes)
    assert all((out == POISON).all() for out in host.outs.values())


STEPS = [(1, 1, 1), (3, 4, 1), (2, 3, 4), (3, 5, 16), (2, 70, 1)]


@pytest.mark.parametrize(("batch", "steps", "topk"), STEPS)
@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("order", ["branch", "step", "table"])
def test_all_steps_of_a_draft(implementation, batch, steps, topk, dtype, order):
    rng, nodes = random.Random(steps), steps * topk
    count = -(-nodes // 64)
    table = poisoned(batch + 1, 128, dtype=torch.int32)
    table.copy_(torch.randperm(table.numel(), device=DEVICE).view(table.shape))
    rows, prefix = list(range(batch, 0, -1)), [rng.randrange(40) for _ in range(batch)]
    drawn = torch.randint(-2, 999, (batch, steps, topk), device=DEVICE)
    slots = drawn.to(dtype)
    if order == "branch":
        slots = slots.transpose(1, 2).contiguous().transpose(1, 2)
    if order == "table":
        slots, held = None, table.tolist()
        drawn = tensor([held[r][p : p + nodes] for r, p in zip(rows, prefix, strict=True)])
        drawn = drawn.view(batch, steps, topk)
    outs = {
        "rows": poisoned(batch),
        "seq_lens": poisoned(batch, dtype=torch.int32),
        "slots": poisoned(batch, steps, topk, dtype=torch.int32),
        "store": poisoned(batch, steps, topk, dtype=torch.int32),
        "positions": poisoned(batch, steps, topk),
        "words": poisoned(batch, steps, topk, count),
    }
    lens = tensor([length + 2 for length in prefix], dtype)
    copy_in_steps(
        tensor(rows, dtype), lens, slots, counted=2, req_to_token=table, out=PlanInputs(**outs)
    )
    assert outs["rows"].tolist() == rows
    assert outs["seq_lens"].tolist() == prefix
    assert torch.equal(outs["store"].long(), drawn)
    assert torch.equal(outs["slots"].long(), drawn.clamp(min=0))
    assert outs["positions"].tolist() == [
        [[length + step] * topk for step in range(steps)] for length in prefix
    ]
    own = [[to_word((1 << j) >> 64 * w & 2**64 - 1) for w in range(count)] for j in range(nodes)]
    words = chain(nodes) if topk == 1 else own
    assert outs["words"].view(batch, nodes, count).tolist() == [words] * batch


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize(("batch", "most"), [(1, 5), (4, 9), (3, 400), (700, 2)])
def test_prompts(implementation, dtype, batch, most):
    rng = random.Random(most)
    new = [rng.randrange(most + 1) for _ in range(batch)]
    prefix = [rng.randrange(99) for _ in range(batch)]
    rows = [rng.randrange(99) for _ in range(batch)]
    slots = [rng.randrange(-1, 1 << 20) for _ in range(sum(new))]
    outs = {
        "rows_out": poisoned(batch),
        "seq_lens_out": poisoned(batch, dtype=torch.int32),
        "indptr_out": poisoned(batch + 1, dtype=torch.int32),
        "slots_out": poisoned(len(slots), dtype=torch.int32),
    }
    given = (tensor(x, dtype) for x in (rows, prefix, new, slots))
    table = poisoned(100, 9, dtype=torch.int32)
    copy_in_prompts(*given, req_to_token=table, **outs)
    assert outs["rows_out"].tolist() == rows
    assert outs["seq_lens_out"].tolist() == prefix
    assert outs["indptr_out"].tolist() == [sum(new[:b]) for b in range(batch + 1)]
    assert outs["slots_out"].tolist() == slots


class OtherPool:
    """What `Window` is written to; a map of every slot, some of which have none."""

    def __init__(self, batch: int, tokens: tuple[int, ...], keys: int, page: int, columns: int):
        self.map = torch.randint(-3, 1 << 16, (1 << 16,), device=DEVICE)
        self.keys, self.page = keys, page
        self.window = Window(
            self.map,
            keys,
            page,
            poisoned(batch, keys + page - 1 + columns, dtype=torch.int32, gap=2),
            poisoned(batch, dtype=torch.int32),
            poisoned(*tokens, dtype=torch.int32),
            poisoned(*tokens, dtype=torch.int32),
            poisoned(*tokens),
        )

    def check(self, held: list[list[int]], rows: list[int], prefix: list[int], new: list[int]):
        """Check the table and its lengths; return where requests begin."""
        other = self.map.tolist()
        starts = [max(length - self.keys, 0) // self.page * self.page for length in prefix]
        kept = [length - start for length, start in zip(prefix, starts, strict=True)]
        assert self.window.seq_lens.tolist() == kept
        for b, row in enumerate(self.window.table.tolist()):
            slots = held[rows[b]][starts[b] : prefix[b] + new[b]]
            want = [max(other[slot], 0) for slot in slots]
            assert row == want + [POISON] * (len(row) - len(want))
        return starts


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("keys", [0, 7, 40])
def test_window_layers_get_a_table_of_their_own(implementation, page, keys):
    host = Host(5, 6)
    host.slots[2][1:3] = -1, -4
    pool = OtherPool(5, (5, 6), keys, page, 0)
    host.copy_in(host.mask("qlen"), window=pool.window)
    host.check()
    starts = pool.check(host.table.tolist(), host.rows, host.prefix, [0] * 5)
    other = pool.map.tolist()
    stored = [[other[slot] if slot >= 0 else -1 for slot in row] for row in host.slots]
    # below 0 is below 0
    assert pool.window.store.clamp(min=-1).tolist() == [[max(s, -1) for s in x] for x in stored]
    assert pool.window.slots.tolist() == [[max(slot, 0) for slot in row] for row in stored]
    assert pool.window.positions.tolist() == [
        [place - start for place in row]
        for row, start in zip(host.outs["positions"].tolist(), starts, strict=True)
    ]
    host.copy_in(kind="prefix", window=pool.window)
    assert not pool.window.slots.any()


def test_a_window_of_many_columns(implementation):
    """More than a program writes at a time."""
    host = Host(2, 3, context=4000)
    host.prefix = [3990, 2500]
    pool = OtherPool(2, (2, 3), 3000, 1, 0)
    host.copy_in(window=pool.window)
    pool.check(host.table.tolist(), host.rows, host.prefix, [0, 0])


@pytest.mark.parametrize("page", [1, 16])
def test_prompts_of_window_layers(implementation, page):
    host, new = Host(4, 1), [9, 0, 20, 3]
    host.prefix = [30, 0, 12, 50]
    slots = [slot for row in range(4) for slot in range(row * 100, row * 100 + new[row])]
    pool = OtherPool(4, (1, sum(new)), 11, page, 20)
    copy_in_prompts(
        *(tensor(x) for x in (host.rows, host.prefix, new, slots)),
        req_to_token=host.table,
        rows_out=poisoned(4),
        seq_lens_out=poisoned(4, dtype=torch.int32),
        indptr_out=poisoned(5, dtype=torch.int32),
        slots_out=poisoned(sum(new), dtype=torch.int32),
        window=pool.window,
    )
    pool.check(host.table.tolist(), host.rows, host.prefix, new)
    stored = pool.map[slots].clamp(min=-1).tolist()
    assert pool.window.store[0].clamp(min=-1).tolist() == stored


def test_windows_that_do_not_fit_are_refused(implementation):
    host = Host(2, 3)
    for message, changes in (
        ("slot_map must be", {"slot_map": torch.zeros(9, device=DEVICE)}),
        (r"table must be \[2, 12\]", {"table": poisoned(2, 11, dtype=torch.int32)}),
        ("store must be", {"store": poisoned(2, 4, dtype=torch.int32)}),
        ("positions must be contiguous", {"positions": poisoned(2, 6)[:, ::2]}),
    ):
        window = replace(OtherPool(2, (2, 3), 9, 4, 0).window, **changes)
        with pytest.raises(ValueError, match=message):
            host.copy_in(window=window)
    assert all((out == POISON).all() for out in host.outs.values())
