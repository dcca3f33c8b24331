"""Distributions, coins and draws against plain Python."""

from __future__ import annotations

import math
import random

import pytest
import torch

from specattn.kernels.sampling import (
    ACCEPT,
    DRAFT,
    FINAL,
    draw_tokens,
    path_coins,
    target_probs,
    uniform,
)
from tests.implementations import using
from tests.kernels.tree_oracle import DEVICE

# kernels count on infinities, of which numpy warns in the interpreter
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")

LAST_COIN = 1 - 2.0**-24
TRITON = "specattn.kernels.sampling.triton_probs"


@pytest.fixture
def small(monkeypatch):
    """Cut rows of few tokens as long ones are cut: over the row, then among few."""
    for name, size in (("BLOCK", 32), ("THRESHOLD_BLOCK", 64), ("KEPT", 16), ("BINS", 16)):
        monkeypatch.setattr(f"{TRITON}.{name}", size)


def probabilities(logits, temperature, top_k, top_p, min_p=0.0):
    """Temperature, then top-k, then top-p, then min-p, in float64."""
    vocab = len(logits)
    if not math.isfinite(max(logits)):
        return [math.nan] * vocab
    ranked = sorted(range(vocab), key=lambda t: (-logits[t], t))
    if temperature == 0:
        return [float(t == ranked[0]) for t in range(vocab)]
    kept = ranked[:top_k] if 0 < top_k < vocab else ranked
    weight = {t: math.exp((logits[t] - logits[ranked[0]]) / temperature) for t in kept}
    total = sum(weight.values())
    top_p = float(torch.tensor(top_p))  # as the kernels see it
    if top_p < 1:
        mass, prefix = 0.0, []
        for token in kept:
            if prefix and mass >= top_p * total:
                break
            prefix.append(token)
            mass += weight[token]
        kept, total = prefix, sum(weight[t] for t in prefix)
    kept = [t for t in kept if weight[t] >= min_p * weight[ranked[0]]]
    total = sum(weight[t] for t in kept)
    return [weight[t] / total if t in kept else 0.0 for t in range(vocab)]


def probs_of(logits, temperature, top_k, top_p, rows_per_req, min_p=None):
    # rows lie apart
    wide = torch.full((len(logits), len(logits[0]) + 3), math.nan, device=DEVICE)
    wide[:, : len(logits[0])] = torch.tensor(logits, device=DEVICE)
    return target_probs(
        wide[:, : len(logits[0])],
        torch.tensor(temperature, dtype=torch.float32, device=DEVICE),
        None if top_k is None else torch.tensor(top_k, dtype=torch.int32, device=DEVICE),
        None if top_p is None else torch.tensor(top_p, dtype=torch.float32, device=DEVICE),
        rows_per_req,
        None if min_p is None else torch.tensor(min_p, dtype=torch.float32, device=DEVICE),
    )


SETTINGS = [
    (0.0, 0, 1.0),
    (1.0, 0, 1.0),
    (0.7, 5, 1.0),
    (1.3, 0, 0.6),
    (2.0, 9, 0.3),
    (0.01, 10_000, 0.999),
    (1.0, 1, 0.01),
]


def rows_of(rng, vocab, make):
    return [[make(rng, t) for t in range(vocab)] for _ in SETTINGS]


@pytest.mark.parametrize("vocab", [1, 33, 301])
def test_target_probs(implementation, vocab, small):
    rng = random.Random(vocab)
    # quarters: ties are frequent
    logits = rows_of(rng, vocab, lambda rng, t: rng.randrange(-12, 13) / 4)
    got = probs_of(logits, *zip(*SETTINGS, strict=True), rows_per_req=1)
    check(
        got, [probabilities(row, *setting) for row, setting in zip(logits, SETTINGS, strict=True)]
    )


@pytest.mark.parametrize("cuts", ["none", "top-k", "top-p", "both"])
def test_min_p_cuts_what_the_others_leave(implementation, cuts, small):
    """Rows without it beside, and greedy ones; two rows share a setting."""
    rng = random.Random(cuts)
    settings = [(0.0, 3, 0.9, 0.5), (1.0, 0, 1.0, 0.0), (0.7, 5, 0.95, 0.13), (2.0, 30, 0.7, 0.31)]
    settings += [(1.3, 9, 0.99, 1.0), (1.0, 0, 0.4, 1e-4)]
    temperature, top_k, top_p, min_p = zip(*settings, strict=True)
    top_k = top_k if cuts in ("top-k", "both") else None
    top_p = top_p if cuts in ("top-p", "both") else None
    logits = torch.tensor([[rng.gauss(0, 3) for _ in range(90)] for _ in range(12)]).tolist()
    got = probs_of(logits, temperature, top_k, top_p, 2, min_p)
    want = [
        probabilities(
            row,
            temperature[i // 2],
            top_k[i // 2] if top_k else 0,
            top_p[i // 2] if top_p else 1.0,
            min_p[i // 2],
        )
        for i, row in enumerate(logits)
    ]
    check(got, want)
    without = probs_of(logits, temperature, top_k, top_p, 2)
    assert torch.equal(got[2:4], without[2:4]), "requests without it keep their bits"


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_min_p_of_rows_without_a_distribution(implementation, odd, small):
    rows = [[0.0, 1.0, -math.inf, 2.0] * 10 for _ in range(2)]
    rows[0][7] = odd
    got = probs_of(rows, [1.0, 1.0], None, None, 1, [0.3, 0.3])
    assert got[0].isnan().all()
    check(got[1:], [probabilities(rows[1], 1.0, 0, 1.0, 0.3)])


ODD = {
    "normal": lambda rng, t: rng.gauss(0, 3),
    "all equal": lambda rng, t: 2.0,
    "mostly -inf": lambda rng, t: rng.gauss(0, 3) if t % 11 == 4 else -math.inf,
    "all -inf": lambda rng, t: -math.inf,
    "one far above": lambda rng, t: 1e4 * (t == 70),
    "wide": lambda rng, t: rng.gauss(0, 3) * 10 ** rng.randrange(-6, 7),
    "masked by numbers": lambda rng, t: rng.gauss(0, 3) if t % 3 else -1e30,
    "a bit apart": lambda rng, t: 1 + rng.randrange(60) * 2.0**-23,
    "few levels": lambda rng, t: -float(rng.randrange(3)) - 90.0 * (t % 5 == 0),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_rows(implementation, name, small):
    """Of each: one cut by number, one by mass, one by both; two rows share a setting."""
    rng = random.Random(name)
    settings = [(1.0, 20, 1.0), (50.0, 0, 0.37), (1.0, 30, 0.8)]
    logits = rows_of(rng, 90, ODD[name])[: 2 * len(settings)]
    logits = torch.tensor(logits).tolist()  # what float32 has of them
    got = probs_of(logits, *zip(*settings, strict=True), rows_per_req=2)
    check(got, [probabilities(row, *settings[i // 2]) for i, row in enumerate(logits)])


@pytest.mark.parametrize("bins", [16, 128])
def test_cuts_among_few_tokens(bins, small, monkeypatch):
    """Lists that hold all of a row, from wide and narrow bins."""
    for name, size in {"BLOCK": 128, "KEPT": 128, "BINS": bins, "FEW_ROWS": 0}.items():
        monkeypatch.setattr(f"{TRITON}.{name}", size)
    rng = random.Random(7)
    settings = [(1.0, 20, 0.8), (9.0, 0, 0.9999)]
    logits = [[make(rng, t) for t in range(90)] for make in ODD.values() for _ in settings]
    logits = torch.tensor(logits).tolist()
    settings = settings * len(ODD)
    with using("triton"):
        got = probs_of(logits, *zip(*settings, strict=True), rows_per_req=1)
    check(
        got, [probabilities(row, *setting) for row, setting in zip(logits, settings, strict=True)]
    )


def test_the_token_after_the_last_of_top_k_is_left_out(implementation, small):
    """Whatever it is: here token 0, in the bin after those that hold as many."""
    counts = [1, 2, 5, 11, 30]
    rows = [[-float(k), *(-float(t) for t in range(40) if t != k)] for k in counts]
    got = probs_of(rows, [1.0] * len(rows), counts, None, 1)
    check(got, [probabilities(row, 1.0, k, 1.0) for row, k in zip(rows, counts, strict=True)])
    assert (got[:, 0] == 0).all()


@pytest.mark.parametrize("cut", [(7, 1.0), (0, 0.24), (20, 0.55)], ids=str)
def test_of_equal_tokens_in_a_list_the_lower_ones_are_kept(cut, small, monkeypatch):
    """Programs write it in their own order."""
    for name, size in {"BLOCK": 16, "KEPT": 128}.items():
        monkeypatch.setattr(f"{TRITON}.{name}", size)
    monkeypatch.setattr(f"{TRITON}.programs_per_row", lambda rows, blocks: 3)
    rng = random.Random(2)
    rows = [[0.0] * 90, [float(rng.randrange(2)) for _ in range(90)]]
    with using("triton"):
        got = probs_of(rows, [1.0] * 2, [cut[0]] * 2, [cut[1]] * 2, 1)
    check(got, [probabilities(row, 1.0, *cut) for row in rows])


@pytest.mark.parametrize("tied", [(0, 1), (0, 89), (1, 2), (88, 89)], ids=str)
def test_of_two_tokens_that_tie_for_the_last_place_one_is_kept(tied, small, monkeypatch):
    """Wherever they are, the first token and the last one among them."""
    for name, size in {"BLOCK": 128, "KEPT": 128, "FEW_ROWS": 0}.items():
        monkeypatch.setattr(f"{TRITON}.{name}", size)
    row = [2.0 if t in tied else 3.0 if t == 40 else -t / 90 for t in range(90)]
    settings = [(2, 1.0), (0, 0.7), (2, 0.9)]
    with using("triton"):
        got = probs_of([row] * 3, [1.0] * 3, *zip(*settings, strict=True), 1)
    check(got, [probabilities(row, 1.0, *cut) for cut in settings])


def test_cuts_do_not_depend_on_the_programs_of_a_row(small, monkeypatch):
    logits = torch.randn(2, 150).bfloat16().tolist()
    settings = [1.0, 2.0], [40, 100], [1.0, 0.6]
    kept = []
    for splits in (1, 3):
        monkeypatch.setattr(f"{TRITON}.programs_per_row", lambda rows, blocks, n=splits: n)
        with using("triton"):
            kept.append(probs_of(logits, *settings, 1) > 0)
    assert torch.equal(kept[0], kept[1])


def check(got, expect):
    expect = torch.tensor(expect)
    torch.testing.assert_close(got.cpu(), expect, atol=1e-6, rtol=2e-5, equal_nan=True)
    assert ((got == 0).cpu() == (expect < 1e-38)).all()


def test_masses_that_are_met_exactly_end_there(implementation, small):
    """Half of four equal tokens are two, a hair more than half are three."""
    more = 0.5 + 2.0**-20
    got = probs_of([[0.0] * 4] * 2, [1.0] * 2, None, [0.5, more], 1)
    assert got.tolist() == [[0.5, 0.5, 0, 0], pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])]


def test_ties_keep_the_lower_token(implementation):
    row = [1.0, 3.0, 3.0, 3.0, 0.0]
    got = probs_of([row] * 3, [0.0, 1.0, 1.0], [0, 2, 0], [1.0, 1.0, 0.5], 1)
    assert got.tolist() == [[0, 1, 0, 0, 0], [0, 0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0, 0]]


def test_settings_that_are_off_change_nothing(implementation):
    logits = torch.randn(4, 50).tolist()
    plain = probs_of(logits, [0.8, 0.0], None, None, 2)
    assert torch.equal(probs_of(logits, [0.8, 0.0], [0, 50], [1.0, 1.0], 2), plain)


@pytest.mark.parametrize("top_k", [None, 0])
def test_a_top_p_of_one_keeps_what_is_lost_in_the_sum(implementation, top_k, small):
    """A weight of e^-60 changes no sum; another row of the batch is cut."""
    row = [0.0, -60.0, *[-math.inf] * 46]
    got = probs_of([row] * 2, [1.0] * 2, top_k if top_k is None else [top_k] * 2, [1.0, 0.9], 1)
    torch.testing.assert_close(got[0, 1].item(), math.exp(-60), rtol=1e-4, atol=0)
    assert got[1].tolist() == [1.0] + [0.0] * 47


def test_extreme_logits_stay_finite(implementation):
    logits = [[-math.inf, 1e30, 0.0], [3e38, -3e38, 3e38], [-math.inf, 1.0, 0.0]]
    got = probs_of(logits, [1e-30, 1.0, 1e-30], [2, 0, 0], [0.9, 1.0, 1.0], 1)
    assert got.tolist() == [[0, 1, 0], [0.5, 0, 0.5], [0, 1, 0]]


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (3, 0.9), (0, 0.5), (2, 1.0)])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_rows_without_a_distribution_are_nan(implementation, odd, top_k, top_p, small):
    """At any temperature; a row of -inf alone is one, too. Those beside them stay as they are."""
    rows = [[0.0, 1.0, -math.inf, 2.0] * 10 for _ in range(4)]
    if odd == -math.inf:
        rows[0] = rows[2] = [odd] * 40
    else:
        rows[0][7], rows[2][39] = odd, odd
    limits = [None if limit is None else [limit] * 4 for limit in (top_k, top_p)]
    settings = [1.0, 1.0, 0.0, 0.0], *limits
    got = probs_of(rows, *settings, 1)
    assert got[[0, 2]].isnan().all()
    want = probs_of([rows[1]] * 4, *settings, 1)
    assert torch.equal(got[[1, 3]], want[[1, 3]])
    assert torch.equal(got[3], torch.eye(40, device=DEVICE)[3])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_vocabularies(dtype):
    """As the twin, over flat and peaked rows; rounding may move a cut by mass by a token."""
    logits = torch.randn(24, 128256, device=DEVICE)
    logits *= torch.tensor([1.0, 3.0, 8.0], device=DEVICE).repeat(8)[:, None]
    logits = logits.to(dtype)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.0], device=DEVICE)
    top_k = torch.tensor([0, 50, 0, 4000], dtype=torch.int32, device=DEVICE)
    top_p = torch.tensor([1.0, 1.0, 0.95, 0.9], device=DEVICE)
    min_p = torch.tensor([0.2, 0.01, 0.0, 0.05], device=DEVICE)
    for k, p, m in (
        *((None, None, None), (top_k, None, None), (None, top_p, None), (top_k, top_p, None)),
        *((None, None, min_p), (top_k, top_p, min_p)),
    ):
        with using("triton"):
            got = target_probs(logits, temperature, k, p, 6, m)
        with using("naive"):
            expect = target_probs(logits, temperature, k, p, 6, m)
        # a probability that is no normal number may be flushed to 0
        tiny = torch.finfo(torch.float32).tiny
        lost, gained = (got == 0) & (expect >= tiny), (got >= tiny) & (expect == 0)
        moved = (lost | gained).sum(1)
        assert (moved <= (2 if p is not None or m is not None else 0)).all(), moved
        torch.testing.assert_close(got.sum(1), torch.ones(24, device=DEVICE))
        torch.testing.assert_close(got, expect, rtol=1e-4, atol=1e-5)


def coin(seed, position, draw):
    """SplitMix64 chained over the three, in unbounded integers."""
    state = seed
    for step in (0, position, draw):
        state = state + step + 0x9E3779B97F4A7C15 & 2**64 - 1
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 2**64 - 1
        state ^= state >> 31
    return (state >> 40) / 2**24


def test_coins_are_the_published_hash(implementation):
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 12345]
    positions = [[0, 1, 2**31], [7, 7, 8]] * 3
    tensors = [torch.tensor(x, device=DEVICE) for x in (seeds, positions)]
    for draw in (ACCEPT, FINAL, DRAFT, 9):
        got = uniform(*tensors, draw)
        assert got.dtype == torch.float32
        assert got.tolist() == [
            [coin(s, p, draw) for p in row] for s, row in zip(seeds, positions, strict=True)
        ]


def test_the_coins_of_a_step(implementation):
    """Depth after depth from each length, in the order of the draws."""
    seeds, lens = [3, -1, 2**62], [0, 9, 2**31 - 2]
    tensors = torch.tensor(seeds, device=DEVICE), torch.tensor(lens, device=DEVICE).int()
    got = path_coins(*tensors, 4, 2)
    assert got.tolist() == [
        [[coin(s, n + depth, draw) for depth in range(4)] for s, n in zip(seeds, lens, strict=True)]
        for draw in (ACCEPT, FINAL)
    ]


def test_draws_of_rows_that_lie_apart(implementation):
    weights = (torch.rand(6, 1300, device=DEVICE) > 0.5).float()[:, :1201]
    weights[3] = 0
    coins = torch.tensor([0.0, 0.25, 0.5, 0.75, LAST_COIN, 0.3], device=DEVICE)
    got = draw_tokens(weights, coins)
    for row, (token, u) in enumerate(zip(got.tolist(), coins.tolist(), strict=True)):
        held = weights[row].nonzero().flatten().tolist()
        assert token == (held[int(u * len(held))] if held else 0)


def test_coins_do_not_depend_on_the_batch():
    seeds, positions = torch.arange(9), torch.arange(9)[:, None] * 3 + torch.arange(4)
    whole = uniform(seeds, positions, ACCEPT)
    assert torch.equal(uniform(seeds[4:6], positions[4:6], ACCEPT), whole[4:6])
    assert torch.equal(uniform(seeds, positions[:, 2], ACCEPT), whole[:, 2])


def test_coins_are_uniform_and_uncorrelated():
    seeds, positions = torch.arange(300), torch.arange(300).expand(300, 300)
    draws = [uniform(seeds, positions, d).double() for d in (ACCEPT, FINAL, DRAFT)]
    for coins in draws:
        assert 0 <= coins.min() <= coins.max() < 1
        counts = torch.histc(coins, 100, 0, 1)
        assert ((counts - 900) ** 2 / 900).sum() < 170  # chi-square, 99 degrees: p > 1e-5
    pairs = [
        (draws[0], draws[1]),
        (draws[1], draws[2]),
        (draws[0][1:], draws[0][:-1]),
        (draws[0][:, 1:], draws[0][:, :-1]),
        (draws[0][1:, :-1], draws[0][:-1, 1:]),
    ]
    for left, right in pairs:
        assert torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1].abs() < 0.015


def test_r18_draws_are_half_open(implementation):
    weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0], device=DEVICE)
    coins = torch.tensor([0.0, 0.25 - 2.0**-24, 0.25, 0.5, LAST_COIN], device=DEVICE)
    assert draw_tokens(weights.expand(5, 5), coins).tolist() == [1, 1, 3, 3, 3]
    # scale does not matter, nor do what cannot be weights
    odd = torch.tensor([-1.0, 1.0, -math.inf, 3.0, 0.0], device=DEVICE)
    assert draw_tokens(odd.expand(5, 5), coins).tolist() == [1, 1, 3, 3, 3]


def test_draws_without_a_distribution_are_token_zero(implementation):
    """Which may be embedded."""
    weights = torch.tensor([[0.0] * 3, [0.0, math.nan, 1.0], [0.0, 1.0, math.inf]], device=DEVICE)
    assert draw_tokens(weights, torch.full((3,), 0.5, device=DEVICE)).tolist() == [0, 0, 0]
