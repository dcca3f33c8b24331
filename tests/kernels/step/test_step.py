"""Begin and end of a step against plain Python over lists."""

from __future__ import annotations

import math
import random

import pytest
import torch

from specattn.batch import AcceptResult
from specattn.kernels.step import StepStart, begin_step, end_step, gather_path
from tests.kernels.tree_oracle import DEVICE, POISON, poisoned

CONTEXT = 40
# of every table: width (None: a number per row), columns that a step reads and writes, dtype
LAYOUTS = {
    "none": [],
    "narrow": [(None, None, torch.int64), (4, 4, torch.float32), (5, 3, torch.int64)],
    "mixed": [
        (None, None, torch.float32),
        (8, 1, torch.int32),
        (33, 33, torch.float16),
        (0, 0, torch.float32),
        (2100, 2077, torch.bfloat16),
        (None, None, torch.int64),
        (32, 32, torch.int64),
        (4500, 4097, torch.float32),
        (7, 0, torch.float32),
        (3, 3, torch.int32),
    ],
}


def numbers(rows, width, dtype, gap=0):
    """Distinct small numbers, every bit of which survives in ``dtype``."""
    shape = (rows,) if width is None else (rows, width)
    out = poisoned(*shape, dtype=dtype, gap=gap if width is not None else 0)
    out.copy_(torch.randint(-120, 121, shape, device=DEVICE))
    return out


def whole(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def ring_of(rows, steps=3, entry=1):
    """Rows in the host's memory, those of other steps poisoned, and whose entry it is."""
    ring = torch.full((steps, len(rows) + 2), POISON, pin_memory=DEVICE == "cuda")
    ring[entry, : len(rows)] = torch.tensor(rows, dtype=torch.int64)
    return ring[:, : len(rows)], whole([entry], torch.int64)


class Begin:
    """Random requests in permuted rows; some rows are padding, some have run out of slots."""

    def __init__(
        self, seed, batch, layout, *, reserve=7, depth=4, steps=3, topk=2, gap=0, read_ahead=None
    ):
        rng = random.Random(seed)
        rows = max(batch, 1) + 3
        self.reserve, self.depth, self.steps, self.topk = reserve, depth, steps, topk
        self.read_ahead = read_ahead
        self.rows = rng.sample(range(1, rows), batch)
        for at in range(batch):
            if rng.random() < 0.2:
                self.rows[at] = 0
        self.lens = [0] + [rng.randrange(CONTEXT - reserve + 3) for _ in range(rows - 1)]
        # from too little by one to more than enough
        self.reserved = [0] + [n + reserve + rng.choice([-1, 0, 3, 9]) for n in self.lens[1:]]
        slots = rng.sample(range(1, rows * CONTEXT + 1), rows * CONTEXT)
        self.slots = [slots[i * CONTEXT : (i + 1) * CONTEXT] for i in range(rows)]
        self.tables = [numbers(rows, width, dtype, gap) for width, _, dtype in layout]
        self.outs = [
            poisoned(batch, dtype=dtype)
            if use is None
            else poisoned(batch, use, dtype=dtype, gap=gap)
            for _, use, dtype in layout
        ]
        table = poisoned(rows, CONTEXT, dtype=torch.int32, gap=gap)
        table.copy_(whole(self.slots))
        self.inputs = (*ring_of(self.rows), whole(self.lens), whole(self.reserved), table)
        self.out = StepStart(
            rows=poisoned(batch),
            seq_lens=poisoned(batch, dtype=torch.int32),
            window=poisoned(batch, reserve, dtype=torch.int32, gap=gap),
            positions=poisoned(batch, depth, gap=gap),
            draft_positions=poisoned(batch, steps + (gap > 0), topk, gap=gap)[:, :steps],
            draft_lens=None if read_ahead is None else poisoned(batch, dtype=torch.int32),
        )

    def run(self):
        begin_step(
            *self.inputs,
            reserve_len=self.reserve,
            out=self.out,
            copies=tuple(zip(self.tables, self.outs, strict=True)),
            read_ahead=self.read_ahead or 0,
        )

    def check(self):
        expect = StepStart([], [], [], [], [], [])
        effective = []
        for row in self.rows:
            room = min(self.reserved[row], CONTEXT)
            row = row if row and self.lens[row] + self.reserve <= room else 0
            length = self.lens[row]
            effective.append(row)
            expect.rows.append(row)
            expect.seq_lens.append(length)
            window = self.slots[row][length : length + self.reserve] if row else [0] * self.reserve
            expect.window.append(window)
            expect.positions.append([length + d for d in range(self.depth)])
            read = length + ((self.read_ahead or 0) if row else 0)
            drafts = [[read + s] * self.topk for s in range(self.steps)]
            if self.read_ahead is not None:
                expect.draft_lens.append(read)
            expect.draft_positions.append(drafts)
        for name, out, want in zip(StepStart._fields, self.out, expect, strict=True):
            assert (out is None and not want) or out.tolist() == want, name
        for at, (table, out) in enumerate(zip(self.tables, self.outs, strict=True)):
            held = table.tolist()
            width = out.shape[1] if out.dim() == 2 else None
            want = [held[r] if width is None else held[r][:width] for r in effective]
            assert out.tolist() == want, at
        return effective


BEGINS = [  # batch, layout, sizes
    (1, "none", {}),
    (6, "narrow", {"gap": 3}),
    (7, "mixed", {"gap": 5, "reserve": 17, "depth": 9, "steps": 5, "topk": 3}),
    (3, "narrow", {"steps": 0, "reserve": 1, "depth": 1}),
    (2, "mixed", {"topk": 1, "steps": 1, "reserve": 33}),
    (0, "narrow", {}),
    (9, "narrow", {"read_ahead": 1}),
    (4, "none", {"read_ahead": 0, "steps": 0}),
    (70, "narrow", {}),
]


@pytest.mark.parametrize(("batch", "layout", "sizes"), BEGINS)
def test_begin(implementation, batch, layout, sizes):
    case = Begin(batch, batch, LAYOUTS[layout], **sizes)
    case.run()
    effective = case.check()
    if batch == 70:
        stalled = [r for r, e in zip(case.rows, effective, strict=True) if r and not e]
        assert stalled
        assert 0 in case.rows
        assert any(effective)


def test_slots_past_the_table_are_no_slots(implementation):
    """Whole pages may reach past the longest context; its last columns may be used, no more."""
    case = Begin(1, 2, LAYOUTS["none"], reserve=5)
    case.rows, case.lens[1:3], case.reserved[1:3] = [2, 1], [CONTEXT - 5, CONTEXT - 4], [64, 64]
    case.inputs = (*ring_of(case.rows), whole(case.lens), whole(case.reserved), case.inputs[-1])
    case.run()
    assert case.check() == [0, 1]


class End:
    """Requests in permuted rows with padding between them; state narrower than its tables."""

    def __init__(self, seed, batch, layout, *, depth=4, gap=0):
        rng = random.Random(seed)
        count = max(batch, 1) + 3
        self.rows = rng.sample(range(1, count), batch)
        for at in range(1, batch, 3):
            self.rows[at] = 0
        self.lens = [rng.randrange(90) if row else 0 for row in self.rows]
        # what padding accepts is anything
        self.accepted = [rng.randrange(1, depth + 1) for _ in self.rows]
        self.tokens = [[rng.randrange(2**40) for _ in range(depth)] for _ in self.rows]
        # the last accepted token, if the target had one
        self.bonus = [
            rng.choice([row[kept - 1], row[kept - 1], -1])
            for row, kept in zip(self.tokens, self.accepted, strict=True)
        ]
        self.roots = numbers(count, None, torch.int64)
        self.roots_before = self.roots.tolist()
        self.sources = [numbers(batch, use, dtype, gap) for _, use, dtype in layout]
        self.tables = [numbers(count, width, dtype, gap) for width, _, dtype in layout]
        self.before = [table.tolist() for table in self.tables]
        self.lengths = numbers(count, None, torch.int32)
        self.lengths_before = self.lengths.tolist()
        self.packed = poisoned(batch, 1 + depth, gap=gap)
        self.accept_tokens = poisoned(batch, depth, gap=gap)
        self.accept_tokens.copy_(whole(self.tokens, torch.int64).view(batch, depth))

    def run(self):
        end_step(
            whole(self.rows, torch.int64),
            whole(self.lens),
            AcceptResult(
                # not read
                poisoned(len(self.rows), 0, dtype=torch.int32),
                self.accept_tokens,
                whole(self.accepted),
                whole(self.bonus, torch.int64),
            ),
            seq_lens_table=self.lengths,
            bonus_table=self.roots,
            copies=tuple(zip(self.sources, self.tables, strict=True)),
            packed_out=self.packed,
        )

    def check(self):
        packed, lengths, tables = [], list(self.lengths_before), self.before
        roots = list(self.roots_before)
        for at, row in enumerate(self.rows):
            kept, tokens = self.accepted[at], list(self.tokens[at])
            if self.bonus[at] < 0:
                tokens[kept - 1] = -1
            packed.append([kept, *tokens] if row else [0] * (1 + len(tokens)))
            if not row:
                continue
            lengths[row] = self.lens[at] + kept
            roots[row] = max(self.bonus[at], 0)
            for table, source in zip(tables, self.sources, strict=True):
                new = source[at].tolist()
                table[row] = new + table[row][len(new) :] if source.dim() == 2 else new
        assert self.packed.tolist() == packed
        # row 0, and rows of requests that sat the step out, are among these
        assert self.lengths.tolist() == lengths
        assert self.roots.tolist() == roots
        for at, (table, want) in enumerate(zip(self.tables, tables, strict=True)):
            assert table.tolist() == want, at


ENDS = [
    (1, "none", {}),
    (5, "narrow", {"gap": 3}),
    (7, "mixed", {"gap": 5, "depth": 9}),
    (2, "mixed", {"depth": 1}),
    (0, "narrow", {}),
    (65, "narrow", {}),
]


@pytest.mark.parametrize(("batch", "layout", "sizes"), ENDS)
def test_end(implementation, batch, layout, sizes):
    case = End(batch, batch, LAYOUTS[layout], **sizes)
    case.run()
    case.check()


def test_padding_writes_nothing(implementation):
    """Whatever a step of padding alone has computed, NaN too, all tables stay as they were."""
    case = End(2, 4, LAYOUTS["mixed"])
    case.rows = [0] * 4
    for source in case.sources:
        source.fill_(math.nan if source.dtype.is_floating_point else POISON)
    case.run()
    case.check()
    assert not case.packed.any()


def test_state_survives_a_step_bit_by_bit(implementation):
    """NaN, infinities and -0 are written and read as they are."""
    odd = torch.tensor([math.nan, -0.0, math.inf, 2.0**-20], device=DEVICE).repeat(3, 9)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        table, new = torch.zeros(4, 36, dtype=dtype, device=DEVICE), odd.to(dtype)
        case = End(0, 3, LAYOUTS["none"])
        case.rows, case.sources, case.tables = [3, 1, 2], [new], [table]
        case.run()
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(table[[3, 1, 2]].view(bits), new.view(bits))
        begin = Begin(0, 3, LAYOUTS["none"])
        begin.inputs = *ring_of([2, 3, 1]), whole([0] * 4), whole([20] * 4), begin.inputs[-1]
        begin.tables, begin.outs = [table], [torch.zeros_like(new)]
        begin.run()
        assert torch.equal(begin.outs[0].view(bits), new[[2, 0, 1]].view(bits))


def path_of(accept_index, accept_lens):
    """Accepted paths of tokens that nobody reads."""
    tokens = accept_index.new_empty(0, dtype=torch.int64)
    return AcceptResult(accept_index, tokens, accept_lens, tokens)


PATHS = [  # batch, nodes, depth, width, dtype in, dtype out
    (1, 1, 1, 1, torch.float32, torch.float32),
    (3, 7, 4, 37, torch.float16, torch.float16),
    (2, 5, 3, 2051, torch.float32, torch.float16),
    (5, 16, 6, 64, torch.float16, torch.float32),
    (0, 4, 3, 8, torch.float32, torch.float32),
]


@pytest.mark.parametrize(("batch", "nodes", "depth", "width", "dtype", "to"), PATHS)
def test_gather_path(implementation, batch, nodes, depth, width, dtype, to):
    """Features are a view of other columns and nodes; a path of no length reads node 0."""
    rng = random.Random(width)
    features = numbers(batch, (nodes + 1) * (width + 3), dtype).view(batch, nodes + 1, width + 3)
    features = features[:, 1:, 2 : width + 2]
    kept = [rng.randrange(depth + 1) for _ in range(batch)]
    paths = [[rng.randrange(nodes) for _ in range(n)] + [-1] * (depth - n) for n in kept]
    lens = [rng.randrange(2**20) for _ in kept]
    index = poisoned(batch, depth, dtype=torch.int32, gap=2)
    index.copy_(whole(paths).view(batch, depth))
    out = poisoned(batch, depth, width, dtype=to, gap=1)
    last, after = poisoned(batch), poisoned(batch)
    gather_path(
        features,
        path_of(index, whole(kept)),
        whole(lens),
        features_out=out,
        last_rows_out=last,
        after_out=after,
    )
    held = features.tolist()
    assert out.tolist() == [[held[b][max(node, 0)] for node in paths[b]] for b in range(batch)]
    assert last.tolist() == [b * depth + max(n, 1) - 1 for b, n in enumerate(kept)]
    assert after.tolist() == [n + k for n, k in zip(lens, kept, strict=True)]


def test_what_does_not_fit_is_refused_by_name(implementation):
    """Nothing is written then."""
    table = torch.zeros(5, 3, device=DEVICE)
    wrong = [
        torch.zeros(2, 4, device=DEVICE),
        torch.zeros(1, 3, device=DEVICE),
        torch.zeros(2, 3, dtype=torch.int32, device=DEVICE),
        torch.zeros(2, 6, device=DEVICE)[:, ::2],
        torch.zeros(2, 1, 3, device=DEVICE),
    ]
    begin, end = Begin(3, 2, []), End(3, 2, [])
    begin.tables, end.tables = [table], [table]
    for part in wrong:
        begin.outs, end.sources = [part], [part]
        with pytest.raises(ValueError, match=r"output of copies\[0\]"):
            begin.run()
        with pytest.raises(ValueError, match=r"source of copies\[0\]"):
            end.run()
    begin.outs, begin.reserve = [table[:2]], begin.reserve + 1
    with pytest.raises(ValueError, match=r"out\.window"):
        begin.run()
    end.sources, end.packed = [table[:2]], end.packed[:, 1:]
    with pytest.raises(ValueError, match="packed_out"):
        end.run()
    assert (begin.out.rows == POISON).all()
    assert (end.packed == POISON).all()
    assert not table.any()


def test_path_of_another_shape_is_refused(implementation):
    zeros = {"dtype": torch.int32, "device": DEVICE}
    out = torch.zeros(2, 3, 5, device=DEVICE)
    with pytest.raises(ValueError, match="features_out"):
        gather_path(
            torch.ones(2, 4, 6, device=DEVICE),
            path_of(torch.zeros(2, 3, **zeros), torch.zeros(2, **zeros)),
            torch.zeros(2, **zeros),
            features_out=out,
            last_rows_out=poisoned(2),
            after_out=poisoned(2),
        )
    assert not out.any()
