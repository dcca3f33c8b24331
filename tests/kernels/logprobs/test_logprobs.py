"""Log-probabilities along accepted paths against plain Python, in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch

from specattn.batch import AcceptResult
from specattn.kernels.logprobs import DRAWN, PROCESSED, RAW, path_logprobs
from tests.implementations import using
from tests.kernels.tree_oracle import DEVICE, POISON, poisoned


def whole(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def logits_of(shape, dtype, generator):
    """Rows that lie apart; many ties, and tokens that are impossible."""
    wide = torch.full((*shape[:-1], shape[-1] + 3), math.nan)
    made = torch.randn(shape, generator=generator).mul(3)
    made[:, :, ::3] = made[:, :, ::3].round()
    made[:, :, 4::9] = -math.inf
    wide[..., : shape[-1]] = made
    return wide.to(DEVICE, dtype)[..., : shape[-1]]


class Case:
    """Random paths of requests in permuted rows; some want nothing, some ride along as padding."""

    def __init__(self, batch, nodes, depth, vocab, *, most=5, dtype=torch.float32, steps=3, gap=2):
        rng, generator = random.Random(vocab), torch.Generator().manual_seed(vocab)
        rows = batch + 4
        self.most, self.depth, self.vocab = most, depth, vocab
        self.rows = rng.sample(range(1, rows), batch)
        self.rows[-1] = self.rows[-1] if batch == 1 else 0
        self.counts = [-1] + [rng.choice([-1, 0, 1, most]) for _ in range(rows - 1)]
        self.counts[self.rows[0]] = most
        self.sources = [rng.choice([RAW, PROCESSED, DRAWN]) for _ in range(rows)]
        self.lens = [rng.randrange(1, depth + 1) for _ in range(batch)]
        self.paths = [rng.sample(range(nodes), n) + [-1] * (depth - n) for n in self.lens]
        shape = (batch, nodes, vocab)
        self.logits = logits_of(shape, dtype, generator)
        self.processed = logits_of(shape, torch.float32, generator).contiguous()
        self.probs = logits_of(shape, torch.float32, generator).softmax(2).contiguous()
        # tokens that are possible in all three
        good = [t for t in range(vocab) if t % 9 != 4]
        self.tokens = [[rng.choice(good) for _ in range(depth)] for _ in range(batch)]
        self.turn = rng.randrange(steps)
        out = (steps, batch + gap, depth, 1 + most)
        self.values = poisoned(*out, dtype=torch.float32)
        self.ids = poisoned(*out)

    def accepted(self):
        bonus = whole([0] * len(self.lens), torch.int64)  # not read
        tokens = whole(self.tokens, torch.int64)
        return AcceptResult(whole(self.paths), tokens, whole(self.lens), bonus, self.probs)

    def run(self):
        path_logprobs(
            self.logits,
            self.accepted(),
            whole(self.rows, torch.int64),
            whole([self.turn], torch.int64),
            counts=whole(self.counts),
            sources=whole(self.sources),
            values_out=self.values,
            ids_out=self.ids,
            processed=self.processed,
        )

    def scores(self, req, node):
        """What the request wants, as logits in float64."""
        kind = self.sources[self.rows[req]]
        scores = {RAW: self.logits, PROCESSED: self.processed, DRAWN: self.probs}[kind]
        row = scores[req, node].double().tolist()
        return row if kind != DRAWN else [math.log(p) if p else -math.inf for p in row]

    def entry(self, req, step):
        """Ids and values of an entry; nothing where nothing is written."""
        count = self.counts[self.rows[req]]
        if count < 0 or step >= self.lens[req]:
            return [], []
        score = self.scores(req, self.paths[req][step])
        peak = max(score)
        total = peak + math.log(math.fsum(math.exp(x - peak) for x in score))
        order = sorted(range(self.vocab), key=lambda t: (-score[t], t))[:count]
        ids = [self.tokens[req][step], *order]
        none = count - len(order)
        return ids + [-1] * none, [score[t] - total for t in ids] + [-math.inf] * none

    def check(self):
        """Everything else is as poisoned as before."""
        values, ids = (
            torch.full_like(x, f) for x, f in ((self.values, math.nan), (self.ids, POISON))
        )
        for req in range(len(self.rows)):
            for step in range(self.depth):
                found, numbers = self.entry(req, step)
                ids[self.turn, req, step, : len(found)] = whole(found, torch.int64)
                values[self.turn, req, step, : len(found)] = torch.tensor(numbers)
        assert self.ids.equal(ids)
        torch.testing.assert_close(self.values, values, rtol=1e-5, atol=2e-6, equal_nan=True)
        return ids


CASES = [  # batch, nodes, depth, vocab
    (1, 1, 1, 1, {"most": 1}),
    (3, 4, 4, 37, {"most": 0}),
    (5, 7, 3, 130, {"dtype": torch.bfloat16}),
    (4, 5, 5, 300, {"dtype": torch.float16, "most": 20}),
    (2, 3, 2, 17, {"most": 20}),
    (7, 2, 2, 61, {"most": 3, "steps": 1, "gap": 0}),
]


@pytest.mark.parametrize(("batch", "nodes", "depth", "vocab", "more"), CASES)
def test_paths(implementation, batch, nodes, depth, vocab, more, monkeypatch):
    """Several splits, some with fewer tokens than are wanted of them."""
    monkeypatch.setattr("specattn.kernels.logprobs.triton.BLOCK", 16)
    case = Case(batch, nodes, depth, vocab, **more)
    case.run()
    assert (case.check() != POISON).any()


def test_a_batch_has_every_kind_and_some_want_nothing():
    """Else `test_paths` would show less than it seems to."""
    cases = [Case(*sizes, **more) for *sizes, more in CASES]
    wanted = {(c.sources[r], c.counts[r] > 0) for c in cases for r in c.rows if c.counts[r] >= 0}
    assert {kind for kind, _ in wanted} == {RAW, PROCESSED, DRAWN}
    assert any(case.counts[row] < 0 for case in cases for row in case.rows if row)


def test_logits_alone(implementation):
    """Without processed logits and probabilities every request gets the target's own."""
    case = Case(3, 4, 3, 40)
    case.sources = [RAW] * len(case.sources)
    case.processed = case.probs = None
    case.run()
    case.check()


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_rows_without_a_softmax(implementation, odd, monkeypatch):
    monkeypatch.setattr("specattn.kernels.logprobs.triton.BLOCK", 16)
    case = Case(1, 2, 2, 50)
    case.sources, case.lens, case.paths = [RAW] * 5, [2], [[0, 1]]
    case.logits[0, 1, 33] = odd
    case.run()
    assert case.values[case.turn, 0, 0].isfinite().all()
    assert case.values[case.turn, 0, 1].isnan().all()
    assert case.ids[case.turn, 0, 1, 1] == 33


def test_no_requests(implementation):
    case = Case(1, 2, 2, 9)
    empty = whole([], torch.int64)
    none = AcceptResult(whole([]).view(0, 2), empty.view(0, 2), whole([]), empty)
    path_logprobs(
        case.logits[:0],
        none,
        empty,
        whole([0], torch.int64),
        counts=whole(case.counts),
        sources=whole(case.sources),
        values_out=case.values,
        ids_out=case.ids,
    )
    assert (case.ids == POISON).all()


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("values", lambda x: x[:, :1], r"values_out must be \[3, 2, 3, 6\]"),
        ("values", lambda x: x.double(), r"values_out must be .* torch\.float32"),
        ("values", lambda x: x.repeat(1, 1, 1, 5), r"alternatives must be 0\.\.20, got 29"),
        ("ids", lambda x: x[..., :2].contiguous(), r"ids_out must be \[3, 4, 3, 6\]"),
        ("ids", lambda x: x[..., ::2], "ids_out must be"),
        ("processed", lambda x: x[:, 1:].contiguous(), "processed must be"),
        ("probs", lambda x: x[..., 1:], "probs must be contiguous"),
        ("logits", lambda x: x.repeat(1, 1, 2)[..., ::2], "logits must be dense"),
    ],
)
def test_refusals(name, make, message):
    case = Case(2, 4, 3, 40)
    setattr(case, name, make(getattr(case, name)))
    with pytest.raises(ValueError, match=message):
        case.run()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("batch", "nodes", "depth"), [(1, 16, 6), (64, 16, 6)])
def test_whole_vocabularies_into_host_memory_from_a_graph(batch, nodes, depth, dtype):
    """As the twin, which runs on the same logits."""
    case = Case(batch, nodes, depth, 300, most=20)
    wide = torch.randn(batch, nodes, 128260, device=DEVICE).mul(3).to(dtype)
    case.logits = wide[..., 1:128257]
    case.processed = case.logits.float() / 2
    case.probs = case.processed.softmax(2)
    with using("naive"):
        case.run()
    want = case.values.clone(), case.ids.clone()
    case.values = torch.full(want[0].shape, math.nan, pin_memory=True)
    case.ids = torch.full(want[1].shape, POISON, pin_memory=True)
    tables = [whole(case.counts), whole(case.sources)]
    inputs = [
        case.accepted(),
        whole(case.rows, torch.int64),
        whole([case.turn], torch.int64),
    ]

    def run():
        path_logprobs(
            case.logits,
            *inputs,
            counts=tables[0],
            sources=tables[1],
            values_out=case.values,
            ids_out=case.ids,
            processed=case.processed,
        )

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    torch.cuda.synchronize()
    case.values.fill_(math.nan)
    case.ids.fill_(POISON)
    graph.replay()
    torch.cuda.synchronize()
    assert case.ids.equal(want[1].cpu())
    torch.testing.assert_close(case.values, want[0].cpu(), rtol=1e-5, atol=1e-5, equal_nan=True)
