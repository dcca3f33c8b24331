"""The most probable tokens against plain Python, in float64: ties, NaN and -inf, any vocabulary."""

from __future__ import annotations

import math
import random

import pytest
import torch

from specattn.kernels.sampling import argmax_tokens, top_tokens
from tests.implementations import using
from tests.kernels.tree_oracle import DEVICE, POISON

ODD = {
    "all equal": lambda rng, vocab: [1.5] * vocab,
    "ties": lambda rng, vocab: [rng.randrange(-3, 3) / 2 for _ in range(vocab)],
    "two zeros": lambda rng, vocab: [rng.choice([0.0, -0.0, -1.0]) for _ in range(vocab)],
    "mostly -inf": lambda rng, vocab: [
        rng.gauss(0, 3) if t % 9 == 4 else -math.inf for t in range(vocab)
    ],
    "NaN among them": lambda rng, vocab: [
        math.nan if t % 5 == 0 else rng.gauss(0, 3) for t in range(vocab)
    ],
    "all -inf": lambda rng, vocab: [-math.inf] * vocab,
    "the last one": lambda rng, vocab: [0.0] * (vocab - 1) + [60000.0],
    "negative": lambda rng, vocab: [-rng.random() * 1e4 - 1 for _ in range(vocab)],
    "normal": lambda rng, vocab: [rng.gauss(0, 4) for _ in range(vocab)],
}


def logits_of(vocab, dtype):
    """Every kind of row, in a tensor whose rows lie apart."""
    rng = random.Random(vocab)
    wide = torch.full((len(ODD), vocab + 3), math.nan)
    wide[:, :vocab] = torch.tensor([make(rng, vocab) for make in ODD.values()])
    return wide.to(DEVICE, dtype)[:, :vocab]


def ranking(row):
    score = [-math.inf if math.isnan(x) else x for x in row]
    return score, sorted(range(len(row)), key=lambda t: (-score[t], t))


def choice(row):
    """The best token; -1 of a row with NaN or infinity, or without a finite number."""
    if any(math.isnan(x) or x == math.inf for x in row) or max(row) == -math.inf:
        return -1
    return ranking(row)[1][0]


def best_of(row, topk):
    """Ids and probabilities, in float64."""
    score, order = ranking(row)
    peak = score[order[0]]
    if peak == -math.inf:
        return order[:topk], [0.0] * topk
    weight = [math.exp(x - peak) for x in score]
    total = math.fsum(weight)
    return order[:topk], [weight[t] / total for t in order[:topk]]


def chosen(logits, topk, **options):
    rows = len(logits)
    probs = torch.full((rows, topk), math.nan, device=DEVICE)
    ids = torch.full((rows, topk), POISON, device=DEVICE)
    top_tokens(logits, topk, probs_out=probs, ids_out=ids, **options)
    return probs, ids


@pytest.mark.parametrize(
    ("vocab", "topk", "dtype"),
    [
        (1, 1, torch.float32),
        (37, 4, torch.float32),
        (130, 5, torch.bfloat16),
        (40, 18, torch.bfloat16),
        (77, 1, torch.float16),
        (40, 18, torch.float16),
    ],
)
def test_top_tokens(implementation, vocab, topk, dtype, monkeypatch):
    logits = logits_of(vocab, dtype)
    # several splits, some smaller than topk
    monkeypatch.setattr("specattn.kernels.sampling.triton_choose.TOP_BLOCKS", (64, 16))
    probs, ids = chosen(logits, topk)
    expect = [best_of(row, topk) for row in logits.double().tolist()]
    assert ids.tolist() == [order for order, _ in expect]
    torch.testing.assert_close(
        probs.cpu(), torch.tensor([p for _, p in expect]), rtol=1e-5, atol=1e-12
    )


def test_top_tokens_by_their_target_ids(implementation):
    logits = logits_of(130, torch.float32)
    # a token's name may need more than 32 bits
    target_ids = torch.randperm(130, device=DEVICE) * 2**33 + 1
    probs, ids = chosen(logits, 5)
    named_probs, named = chosen(logits, 5, target_ids=target_ids)
    assert named.equal(target_ids[ids])
    assert named_probs.equal(probs)
    for wrong in (target_ids[1:], target_ids.int(), target_ids.repeat_interleave(2)[::2]):
        with pytest.raises(ValueError, match="target_ids must be"):
            chosen(logits, 5, target_ids=wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 301, 4100])
def test_argmax_tokens(implementation, vocab, dtype):
    logits = logits_of(vocab, dtype)
    got = argmax_tokens(logits)
    assert got.dtype == torch.int64
    assert got.tolist() == [choice(row) for row in logits.double().tolist()]


@pytest.mark.parametrize("splits", [1, 2])
def test_argmax_of_rows_in_few_splits(splits, monkeypatch):
    """Many rows are not split, or less than there are tiles."""
    module = "specattn.kernels.sampling"
    monkeypatch.setattr(f"{module}.programs_per_row", lambda rows, tiles: splits)
    logits = logits_of(2 * 2048 + 5, torch.float32)
    with using("triton"):
        got = argmax_tokens(logits)
    assert got.tolist() == [choice(row) for row in logits.double().tolist()]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_argmax_of_a_row_with_one_odd_number(implementation, odd, splits, monkeypatch):
    """Wherever it is; rows beside it, and masks of -inf, choose as ever."""
    module = "specattn.kernels.sampling"
    monkeypatch.setattr(f"{module}.programs_per_row", lambda rows, tiles: splits)
    logits = torch.full((4, 3 * 2048), -math.inf)
    logits[:, [5, 4100]] = torch.tensor([1.0, 2.0])
    logits[0, 6000], logits[2, 0] = odd, odd
    assert argmax_tokens(logits.to(DEVICE)).tolist() == [-1, 4100, -1, 4100]


def test_no_rows(implementation):
    empty = torch.empty(0, 7, device=DEVICE)
    assert chosen(empty, 2)[1].shape == (0, 2)
    assert argmax_tokens(empty).shape == (0,)


def test_more_than_there_are_is_refused(implementation):
    with pytest.raises(ValueError, match=r"topk must be 1\.\.3"):
        chosen(torch.zeros(2, 3, device=DEVICE), 4)


def test_columns_are_refused():
    with pytest.raises(ValueError, match="dense in its last axis"):
        argmax_tokens(torch.zeros(3, 4, device=DEVICE).t())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "topk", "dtype"),
    [
        (16, 8, torch.bfloat16),
        (3, 10, torch.float32),
        (2500, 1, torch.bfloat16),
    ],
)
def test_whole_vocabularies(rows, topk, dtype):
    """As the twin: bfloat16 has many equal logits in 128256."""
    wide = torch.randn(rows, 128260, device=DEVICE).mul(3).to(dtype)
    for logits in (wide[:, :128256], wide[:, 1:128256]):
        with using("triton"):
            (probs, ids), best = chosen(logits, topk), argmax_tokens(logits)
        with using("naive"):
            expect, want = chosen(logits, topk), argmax_tokens(logits)
        assert torch.equal(ids, expect[1])
        torch.testing.assert_close(probs, expect[0], rtol=1e-5, atol=1e-12)
        assert torch.equal(best, want)
