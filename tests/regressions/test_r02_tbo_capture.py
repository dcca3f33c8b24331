"""R02: sglang#26665 (a reland of #26134, reverted by #26166).

Two-batch overlap captured a batch size by running its own replay instead of the capture of its
parts, so the per-size tables of the primary stayed empty: ``KeyError`` at the first replay.

There is no table to forget: capturing a bucket binds both halves, and a replay runs what was
bound. Buckets of 2, 4 and 8 serve batches of 1 to 8, chains and trees, and equal the unsplit
backend; a replay's halves hold exactly their rows of the whole.
"""

from __future__ import annotations

import pytest
import torch

from specattn.backends.tbo import BoundTbo, tbo
from specattn.batch import ForwardMode
from specattn.config import SpecConfig
from tests.backends.spies import spy
from tests.worlds import BACKENDS, DEVICE, inputs, part_of, same, world

VERIFY = ForwardMode.TARGET_VERIFY
BUCKETS = [2, 4, 8]
TREES = {
    "chain": SpecConfig(3, 1, 4, max_context_len=256, max_num_reqs=8),
    "tree": SpecConfig(3, 4, 8, max_context_len=256, max_num_reqs=8, page_size=4),
}


def lengths(size: int) -> list[int]:
    return [(61 * size + 37 * b) % 240 for b in range(size)]


def verify_inputs(lens: list[int], config: SpecConfig) -> dict[str, torch.Tensor]:
    values = inputs(VERIFY, lens, len(lens), config)
    if config.topk == 1:
        depth = torch.arange(config.num_draft_tokens, device=DEVICE)
        values["tree_positions"] = torch.tensor(lens, device=DEVICE)[:, None] + depth
        values["words"] = ((2 << depth) - 1).expand(len(lens), -1)[..., None]
    return values


@pytest.mark.parametrize("config", TREES.values(), ids=TREES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_captured_size_replays_and_equals_the_unsplit_backend(backend, config):
    split, whole = world(tbo(backend), BUCKETS, config), world(backend, BUCKETS, config)
    for size in (1, 8, 3, 2, 5, 7, 4, 6):
        lens = lengths(size)
        values = verify_inputs(lens, config)
        for one in (split, whole):
            one.poison(lens)
        same(split.run(VERIFY, lens, values), whole.run(VERIFY, lens, values))
    assert split.decoder.runner.captured(part_of(VERIFY)) == BUCKETS
    assert split.decoder.runner.stats.replays[part_of(VERIFY)] == 8
    assert not split.decoder.runner.stats.eager


@pytest.mark.parametrize("config", TREES.values(), ids=TREES)
def test_capture_binds_every_part_that_replays_use(config):
    primary, first, second = spy("primary"), spy("first"), spy("second")
    one = world(tbo(primary, (first, second)), BUCKETS, config)
    layers = len(set(one.decoder.target.model.layers))
    for child in (first, second):
        assert child.binds.count("verify") == layers * len(BUCKETS)
    assert primary.binds == [], "nothing here runs unsplit"
    bound = len(first.binds)
    first.ran.clear()
    second.ran.clear()
    lens = lengths(3)
    one.poison(lens)
    one.run(VERIFY, lens, verify_inputs(lens, config))
    assert len(first.binds) == bound, "a replay binds nothing"
    nodes = config.num_draft_tokens
    ran = set(first.ran[-layers:]), set(second.ran[-layers:])
    assert ran == ({2 * nodes}, {2 * nodes})


@pytest.mark.parametrize("config", TREES.values(), ids=TREES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_halves_of_a_replay_are_the_rows_of_the_whole(backend, config):
    """Odd batches in an even bucket, and a second half that is all padding."""
    one = world(tbo(backend), BUCKETS, config)
    for size in (5, 3, 1):
        lens = lengths(size)
        one.poison(lens)
        one.run(VERIFY, lens, verify_inputs(lens, config))
        bucket = next(b for b in BUCKETS if b >= size)
        attention = one.step(VERIFY, bucket).verify_attention
        for bound in attention.bounds:
            assert isinstance(bound, BoundTbo)
            for name in ("req_pool_indices", "seq_lens", "positions", "tail_slots", "tail_words"):
                first, second = (getattr(plan, name) for plan in bound.plans)
                whole = getattr(attention.plan, name)
                assert torch.equal(torch.cat([first, second]), whole), name
                assert len(first) == bucket // 2
            assert sum(int(plan.seq_lens.sum()) for plan in bound.plans) == sum(lens)
