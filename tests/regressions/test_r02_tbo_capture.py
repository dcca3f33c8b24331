"""R02: sglang#26665 (a reland of #26134, reverted by #26166).

Two-batch overlap captured a batch size by running its own replay instead of the capture of its
parts, so the per-size tables of the primary stayed empty: ``KeyError`` at the first replay.

There is no table to forget: capturing a bucket binds both halves, and a replay runs what was
bound. Buckets of 2, 4 and 8 serve batches of 1 to 8, chains and trees, and equal the unsplit
steps; a replay's halves hold exactly their rows of the whole.
"""

from __future__ import annotations

import pytest
import torch

from specattn.batch import ForwardMode
from specattn.config import SpecConfig
from tests.backends.spies import spy
from tests.worlds import BACKENDS, DEVICE, MODES, inputs, part_of, same, world

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
def test_every_captured_size_replays_and_equals_the_unsplit_step(backend, config):
    split, whole = (world(backend, BUCKETS, config, tbo=tbo) for tbo in (True, False))
    for size in (1, 8, 3, 2, 5, 7, 4, 6):
        lens = lengths(size)
        values = verify_inputs(lens, config)
        for one in (split, whole):
            one.poison(lens)
        same(split.run(VERIFY, lens, values), whole.run(VERIFY, lens, values))
    assert split.decoder.runner.captured(part_of(VERIFY)) == BUCKETS
    assert split.decoder.runner.stats.replays[part_of(VERIFY)] == 8
    assert not split.decoder.runner.stats.eager


@pytest.mark.parametrize("indices", ["table", "csr"])
@pytest.mark.parametrize("mode", MODES[1:], ids=lambda mode: mode.value)
def test_drafts_and_their_extends_are_split_alike(mode, indices):
    split, whole = (world(BACKENDS[-1], [5, 8], indices=indices, tbo=tbo) for tbo in (True, False))
    for seed, size in enumerate([8, 1, 3, 5]):
        lens = lengths(size)
        values = inputs(mode, lens, seed)
        for one in (split, whole):
            one.poison(lens)
        same(split.run(mode, lens, values), whole.run(mode, lens, values))
    assert not split.decoder.runner.stats.eager


@pytest.mark.parametrize("config", TREES.values(), ids=TREES)
def test_capture_binds_every_part_that_replays_use(config):
    noted = spy("noted")
    one = world(noted, BUCKETS, config, tbo=True)
    kinds = len(set(one.decoder.target.model.layers))
    assert noted.binds.count("verify") == 2 * kinds * len(BUCKETS)
    bound = len(noted.binds)
    noted.ran.clear()
    lens = lengths(3)
    one.poison(lens)
    one.run(VERIFY, lens, verify_inputs(lens, config))
    assert len(noted.binds) == bound, "a replay binds nothing"
    layers = len(one.decoder.target.model.layers)
    assert noted.ran[-2 * layers :] == [2 * config.num_draft_tokens] * 2 * layers
    assert 4 * config.num_draft_tokens not in noted.ran, "nothing here runs unsplit"


@pytest.mark.parametrize("config", TREES.values(), ids=TREES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_halves_of_a_replay_are_the_rows_of_the_whole(backend, config):
    """Odd batches in an even bucket, and a second half that is all padding."""
    split, whole = (world(backend, BUCKETS, config, tbo=tbo) for tbo in (True, False))
    for size in (5, 3, 1):
        lens = lengths(size)
        for one in (split, whole):
            one.poison(lens)
            one.run(VERIFY, lens, verify_inputs(lens, config))
        bucket = next(b for b in BUCKETS if b >= size)
        first, second = (step.verify_attention.plan for step in split.steps(VERIFY, bucket))
        wanted = whole.step(VERIFY, bucket).verify_attention.plan
        for name in ("req_pool_indices", "seq_lens", "positions", "tail_slots", "tail_words"):
            halves = getattr(first, name), getattr(second, name)
            # an unsplit step's padding keeps what ran there before
            assert torch.equal(torch.cat(halves)[:size], getattr(wanted, name)[:size]), name
            assert len(halves[0]) == bucket // 2
        assert sum(int(plan.seq_lens.sum()) for plan in (first, second)) == sum(lens)
