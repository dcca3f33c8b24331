"""Logits processors along trees against Python's float64, node by node."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from specattn.batch import DraftTree
from specattn.kernels.processors import PENALTIES, bitmask_words, note_tokens, process_logits
from specattn.speculative.sampling.params import SamplingParams
from specattn.speculative.sampling.processors import ProcessorStates
from tests.implementations import using
from tests.kernels.tree_oracle import DEVICE
from tests.processors import processed
from tests.worlds import tree_of

TRITON = "specattn.kernels.processors.triton"


@pytest.fixture
def small(monkeypatch):
    """Several blocks per row."""
    monkeypatch.setattr(f"{TRITON}.BLOCK", 32)
    monkeypatch.setattr(f"{TRITON}.LISTED", 16)


def params_of(rng: random.Random, vocab: int, text: list[int]) -> SamplingParams:
    """A random request; most of its bad words begin as the text may go on."""
    few = range(min(vocab, 7))
    pick = lambda share: rng.random() < share  # noqa: E731
    return SamplingParams(
        repetition_penalty=rng.choice([1.0, 0.6, 1.8]),
        frequency_penalty=rng.choice([0.0, 0.7, -0.4]),
        presence_penalty=rng.choice([0.0, 1.5, -1.1]),
        logit_bias={
            t: -math.inf if pick(0.2) else rng.gauss(0, 4)
            for t in rng.sample(range(vocab), min(vocab // 3, 500))
            if pick(0.6)
        },
        bad_words=[
            [*text[len(text) - n :], *(rng.choice(few) for _ in range(rng.randrange(1, 4)))]
            for n in (0, 0, 0, 1, 2, min(12, len(text)))
        ]
        if pick(0.7)
        else [],
        allowed_tokens=[t for t in range(vocab) if pick(0.8)] or None if pick(0.5) else None,
    )


class Case:
    """Requests in permuted rows, some without processors, the last one padding; random trees."""

    def __init__(self, batch, nodes, vocab, *, seed=0, dtype=torch.float32, most=9):
        rng = random.Random(seed + vocab)
        self.batch, self.nodes, self.vocab = batch, nodes, vocab
        self.rows = [*rng.sample(range(1, batch + 4), batch - 1), 0]
        self.at = torch.tensor(self.rows, device=DEVICE)
        self.states = ProcessorStates.alloc(batch + 4, vocab, DEVICE)
        self.states.history.fill_(2)  # of others, and never read
        few = range(min(vocab, 7))  # so that texts and paths repeat
        self.asked, self.prompts, self.outputs, self.least = [], [], [], []
        self.ends, self.masked = (1, 3), []
        for row in self.rows:
            text = [rng.choice(few) for _ in range(rng.randrange(2, 2 * most))]
            cut = rng.randrange(1, len(text))
            plain = row == 0 or rng.random() < 0.2
            self.asked.append(SamplingParams() if plain else params_of(rng, vocab, text))
            self.least.append(0 if plain else rng.choice([0, len(text) - cut + 1]))
            self.masked.append(not plain and rng.random() < 0.5)
            self.prompts.append(text[:cut])
            self.outputs.append(text[cut:])
        self._admit()
        parents = [[-1] + [rng.randrange(j) for j in range(1, nodes)] for _ in self.rows]
        # each word holds 64 nodes
        words, depths = zip(*(tree_of(p) for p in parents), strict=True)
        wide = -(-nodes // 64)
        self.parents = parents
        self.words = torch.tensor(
            [[[_signed(w >> 64 * i) for i in range(wide)] for w in one] for one in words]
        ).to(DEVICE)
        tokens = [[rng.choice(few) for _ in range(nodes)] for _ in self.rows]
        for one, output in zip(tokens, self.outputs, strict=True):
            one[0] = output[-1]
        self.tokens = torch.tensor(tokens, device=DEVICE)
        lens = [len(p) + len(o) - 1 for p, o in zip(self.prompts, self.outputs, strict=True)]
        self.positions = (torch.tensor(lens)[:, None] + torch.tensor(depths)).to(DEVICE)
        generator = torch.Generator().manual_seed(seed)
        apart = torch.full((batch, nodes, vocab + 3), math.nan)
        apart[..., :vocab] = torch.randn(batch, nodes, vocab, generator=generator) * 3
        self.logits = apart.to(DEVICE, dtype)[..., :vocab]
        allowed = torch.rand(batch, nodes, vocab, generator=generator) < 0.7
        self.allowed = allowed
        self.bitmask = _packed(allowed).to(DEVICE)

    def _admit(self) -> None:
        for at, row in enumerate(self.rows):
            if not row:
                continue
            self.states.admit(
                row,
                self.asked[at],
                self.prompts[at],
                min_new_tokens=self.least[at],
                end_ids=self.ends,
                bitmask=self.masked[at],
            )
        # two steps: what the first emitted may be more than is kept of the text
        for begin, end in ((0, 1), (1, 99)):
            parts = [one[begin:end] for one in self.outputs]
            width = max(map(len, parts))
            padded = [one + [0] * (width - len(one)) for one in parts]
            self.states.note(
                self.at,
                torch.tensor(padded, device=DEVICE),
                torch.tensor([len(one) for one in parts], dtype=torch.int32, device=DEVICE),
            )

    def tree(self):
        blank = torch.empty(0, device=DEVICE)
        return DraftTree(self.tokens, self.positions, self.words, *[blank] * 3)

    def run(self):
        return self.states.process(self.tree(), self.logits, self.at, self.bitmask)

    def expect(self):
        tokens, logits = self.tokens.tolist(), self.logits.double().tolist()
        return [
            [self._node(b, i, tokens[b], logits[b][i]) for i in range(self.nodes)]
            for b in range(self.batch)
        ]

    def _node(self, b, i, tokens, logits):
        path, node = [], i
        while node > 0:
            path, node = [tokens[node], *path], self.parents[b][node]
        text = [*self.outputs[b], *path]
        scores = processed(
            logits,
            self.prompts[b],
            text,
            self.asked[b],
            min_new_tokens=self.least[b],
            ends=self.ends,
        )
        if self.masked[b]:
            allowed = self.allowed[b, i].tolist()
            scores = [x if ok else -math.inf for x, ok in zip(scores, allowed, strict=True)]
        return scores


def _signed(word: int) -> int:
    """64 bits as int64."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def _packed(allowed: torch.Tensor) -> torch.Tensor:
    """Booleans as int32 words, by their documented layout."""
    whole = torch.nn.functional.pad(allowed, (0, -allowed.shape[-1] % 32))
    words = (whole.unflatten(-1, (-1, 32)) * 2 ** torch.arange(32)).sum(-1)
    return (words - (words >> 31 << 32)).to(torch.int32)


@pytest.mark.parametrize(
    ("batch", "nodes", "vocab", "seed"),
    [(4, 5, 67, 0), (7, 4, 33, 1), (6, 9, 64, 2), (3, 1, 40, 3)],
)
def test_every_node_has_its_own_history(implementation, small, batch, nodes, vocab, seed):
    case = Case(batch, nodes, vocab, seed=seed)
    got, want = case.run(), torch.tensor(case.expect(), dtype=torch.float64)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double().cpu(), want, rtol=3e-6, atol=3e-6)
    for at, asked in enumerate(case.asked):
        if not (asked.processed or case.least[at] or case.masked[at]):
            assert torch.equal(got[at], case.logits[at]), (
                "rows that ask for nothing keep their bits"
            )


def test_trees_of_more_than_a_word(implementation):
    case = Case(2, 70, 35, seed=5, most=4)
    want = torch.tensor(case.expect(), dtype=torch.float64)
    torch.testing.assert_close(case.run().double().cpu(), want, rtol=3e-6, atol=3e-6)


def test_nan_stays_where_it_may_be_chosen(implementation):
    """What marks a row as unsound is not lost."""
    case = Case(4, 3, 40, seed=1)
    case.logits[:, 1, 5] = math.nan
    got, want = case.run().cpu(), torch.tensor(case.expect())
    assert torch.equal(got.isnan(), want.isnan())
    assert got.isnan().any()


def test_the_history_does_not_count_what_is_no_token(implementation):
    """A last token of -1 says that logits were not finite."""
    columns = ProcessorStates.alloc(4, 9, torch.device(DEVICE))
    columns.kinds.fill_(PENALTIES)
    recent = torch.tensor([[-2, -2, -2], [8, 7, -2], [8, -2, -2], [8, 7, 6]])
    columns.recent[:, :3].copy_(recent)
    note_tokens(
        torch.tensor([2, 0, 3, 1], device=DEVICE),
        torch.tensor([[3, 3, -1], [4, 4, 4], [-1, 5, 5], [1, 2, 3]], device=DEVICE),
        torch.tensor([3, 3, 1, 2], dtype=torch.int32, device=DEVICE),
        columns=columns,
    )
    want = torch.zeros(4, 9, dtype=torch.int32)
    want[2, 3], want[1, 1], want[1, 2] = 4, 2, 2
    assert torch.equal(columns.history.cpu(), want)
    assert columns.recent[1:, :3].tolist() == [[2, 1, 8], [3, 3, 8], [8, 7, 6]]


def test_a_bitmask_of_another_width_is_refused():
    case = Case(3, 2, 70)
    assert bitmask_words(70) == 3
    wide = torch.zeros(3, 2, 4, dtype=torch.int32, device=DEVICE)
    for bad in (wide, wide[..., :2], case.bitmask.long()):
        case.bitmask = bad
        with pytest.raises(ValueError, match=r"bitmask must be \[3, 2, 3\] torch.int32, a bit per"):
            case.run()


def test_shapes_are_checked():
    case = Case(3, 2, 70)
    tree, columns = case.tree(), case.states
    fewer = replace(tree, tokens=case.tokens[:, :1])
    with pytest.raises(ValueError, match=r"tokens must be \[3, 2\]"):
        process_logits(case.logits, fewer, case.at, columns=columns)
    with pytest.raises(ValueError, match=r"history must be \[\d, 69\], got"):
        process_logits(case.logits[..., :69], tree, case.at, columns=columns)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replays_of_a_graph(dtype):
    """Whole vocabularies, in bfloat16 too: each replay reads what is in the tables by then."""
    case = Case(6, 16, 128256, seed=4, dtype=dtype)
    with using("triton"):
        case.run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = case.run()
        for seed in range(3):
            other = Case(6, 16, 128256, seed=10 + seed, dtype=dtype)
            for mine, theirs in (
                *zip(case.states.tensors().values(), other.states.tensors().values(), strict=True),
                (case.tokens, other.tokens),
                (case.words, other.words),
                (case.positions, other.positions),
                (case.logits, other.logits),
                (case.bitmask, other.bitmask),
            ):
                mine.copy_(theirs)
            # rows are baked in; those of the other case become these
            for mine, theirs in zip(
                case.states.tensors().values(), other.states.tensors().values(), strict=True
            ):
                mine[case.at] = theirs[other.at]
            graph.replay()
            with using("naive"):
                want = other.run()
            torch.testing.assert_close(got, want, rtol=3e-6, atol=3e-6)
