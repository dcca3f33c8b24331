"""What a chunk of prompts begins with, against plain Python over lists."""

from __future__ import annotations

import random
import struct

import pytest
import torch

from specattn.kernels.prompts import COLUMNS, PieceStart, TokenStart, begin_prompts, clear_rows
from tests.kernels.tree_oracle import DEVICE, POISON, poisoned

CONTEXT, ROWS = 40, 9


def bits(number: float) -> int:
    return struct.unpack("i", struct.pack("f", number))[0]


class Chunk:
    """Random pieces in permuted rows, then pieces without places, then padding."""

    def __init__(self, seed, lens, *, spare=0, padding=0, ahead=False, gap=0):
        rng = random.Random(seed)
        rows = rng.sample(range(1, ROWS), len(lens))
        slots = rng.sample(range(1, ROWS * CONTEXT + 1), ROWS * CONTEXT)
        self.slots = [slots[i * CONTEXT : (i + 1) * CONTEXT] for i in range(ROWS)]
        self.lens = [*lens, *[0] * spare]
        self.count, self.size = len(self.lens), sum(lens) + padding
        texts = [[rng.randrange(1, 2**33) for _ in range(length)] for length in lens]
        self.want: dict[str, list] = {name: [] for name in PieceStart._fields}
        self.places: dict[str, list] = {name: [] for name in TokenStart._fields}
        columns, begin = [], 0
        for at, length in enumerate(self.lens):
            row = rows[at] if length else 0
            start = rng.randrange(CONTEXT - length + 1) if length else 0
            ends = not length or rng.random() < 0.6
            behind = int(ahead and ends and length > 1)
            follows = -1 if ends else rng.randrange(2**31)
            drawn = rng.choice([0.0, 0.7]), rng.choice([1.0, 0.9])
            seed, top_k = rng.randrange(2**62), rng.randrange(50)
            columns.append([row, start, begin, length, behind, follows, seed, top_k])
            columns[-1] += map(bits, drawn)
            text = texts[at] if length else []
            own = text[: length - behind]
            self.note(row, start, begin, length, behind, ends and bool(length))
            self.want["seeds"].append(seed)
            self.want["top_k"].append(top_k)
            for name, value in zip(("temperature", "top_p"), drawn, strict=True):
                self.want[name].append(pytest.approx(value))
            self.places["tokens"] += text
            self.places["next_ids"] += [*own[1:], max(follows, 0), None][: len(own)] if own else []
            self.places["next_ids"] += [None] * behind
            self.places["rows"] += [row] * length
            self.places["positions"] += [start + i for i in range(length)]
            self.places["slots"] += self.slots[row][start : start + length]
            begin += length
        self.want["qo_indptr"].append(begin)
        for name, values in self.places.items():
            values += [-1 if name == "slots" else 0] * padding
        ring = torch.full((3, self.count + 1, COLUMNS), POISON, pin_memory=DEVICE == "cuda")
        ring[2, : self.count] = torch.tensor(columns)
        tokens = torch.full((3, self.size + 4), POISON, pin_memory=DEVICE == "cuda")
        flat = [token for text in texts for token in text]
        tokens[2, : len(flat)] = torch.tensor(flat, dtype=torch.int64)
        table = poisoned(ROWS, CONTEXT, dtype=torch.int32, gap=gap)
        table.copy_(torch.tensor(self.slots))
        entry = torch.tensor([2], device=DEVICE)
        self.inputs = ring[:, : self.count], tokens[:, : self.size], entry, table

    def note(self, row, start, begin, length, behind, ended):
        last = max(begin + length - 1, 0)
        values = {
            "rows": row,
            "seq_lens": start,
            "qo_indptr": begin,
            "last": max(last - behind, 0),
            "places": last,
            "ended": row if ended else 0,
            "before": start + length - behind - 1 if ended else 0,
        }
        for name, value in values.items():
            self.want[name].append(value)

    def check(self):
        kinds = {"seq_lens": 0, "qo_indptr": 0, "before": 0, "top_k": 0, "slots": 0}
        floats = ("temperature", "top_p")

        def out(name, length):
            dtype = torch.int32 if name in kinds else torch.int64
            return poisoned(length, dtype=torch.float32 if name in floats else dtype)

        pieces = {name: out(name, self.count) for name in PieceStart._fields}
        pieces["qo_indptr"] = out("qo_indptr", self.count + 1)
        tokens = {name: out(name, self.size) for name in TokenStart._fields}
        begin_prompts(
            *self.inputs, pieces_out=PieceStart(**pieces), tokens_out=TokenStart(**tokens)
        )
        for name, want in self.want.items():
            assert pieces[name].tolist() == want, name
        for name, want in self.places.items():
            found = tokens[name].tolist()
            assert [None if w is None else f for f, w in zip(found, want, strict=True)] == want, (
                name
            )


CHUNKS = [
    ([5], {}),
    ([1], {"spare": 7, "padding": 31}),
    ([3, 1, 9], {"spare": 1, "padding": 3, "gap": 5}),
    ([40, 40, 40, 17], {"spare": 4, "padding": 119}),
    ([3, 2, 7, 4], {"ahead": True, "padding": 5}),
    ([40] * 8, {"ahead": True}),
    ([], {"spare": 8, "padding": 32}),
    ([2, 1, 1, 5, 6], {}),
]


@pytest.mark.parametrize(("lens", "sizes"), CHUNKS)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_chunk_begins(implementation, lens, sizes, seed):
    Chunk(seed, lens, **sizes).check()


def test_what_does_not_fit_is_refused():
    chunk = Chunk(0, [3, 4])
    pieces, *others = chunk.inputs
    with pytest.raises(ValueError, match=r"pieces must be \[3, 2, 10\]"):
        begin_prompts(pieces[..., :9], *others, pieces_out=None, tokens_out=None)


@pytest.mark.parametrize("size", [(3,), (5, 700), (2, 0)])
def test_rows_are_cleared_where_texts_begin(implementation, size) -> None:
    held = torch.full((2, 6, *size), torch.nan, device=DEVICE)
    rows = torch.tensor([4, 0, 2, 5, 0], device=DEVICE)
    lens = torch.tensor([0, 0, 7, 0, 3], dtype=torch.int32, device=DEVICE)
    clear_rows(held, rows, lens)
    assert (held[:, [4, 5]] == 0).all()
    assert held[:, [0, 1, 2, 3]].isnan().all()
    clear_rows(held, rows[:0], lens[:0])
    with pytest.raises(ValueError, match="seq_lens must"):
        clear_rows(held, rows, lens.long())
