"""R03: sglang#24319, sglang#24212; also sglang#7225, sglang#7569.

Splitting a verify batch in two cut its dense mask, whose offsets are sums of lengths on the host;
the overlapped scheduler had none: ``split_spec_info: seq_lens_cpu is None``.

A mask here is words per request, so that the split is a slice: no length is read, on the host or
elsewhere. Only a backend that plans on the host asks for lengths, by name, and gets its half.
"""

from __future__ import annotations

import pytest
import torch

from specattn.backends.tbo import tbo
from specattn.errors import UnsupportedError
from tests.backends.spies import spy
from tests.regressions.test_r02_tbo_capture import TREES, VERIFY, lengths, verify_inputs
from tests.worlds import BACKENDS, DEVICE, identical, world


def run(one, lens: list[int], config, on_host: torch.Tensor | None) -> dict[str, torch.Tensor]:
    one.poison(lens)
    values = verify_inputs(lens, config)
    return {"logits": one.run(VERIFY, lens, values, on_host=on_host is not None)["logits"]}


@pytest.mark.parametrize("config", TREES.values(), ids=TREES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_read_on_the_host_to_split(backend, config):
    one = world(tbo(backend), [4], config)
    for size in (3, 1, 4):
        lens = lengths(size)
        given = run(one, lens, config, torch.tensor(lens, dtype=torch.int32))
        absent = run(one, lens, config, None)
        identical(absent, given)
        assert not absent["logits"].isnan().any()


def test_no_lengths_stay_no_lengths():
    first, second = spy("first"), spy("second")
    config = TREES["tree"]
    one = world(tbo("torch_native", (first, second)), [4], config)
    first.scheduled.clear()
    second.scheduled.clear()
    run(one, lengths(3), config, None)
    assert set(first.scheduled) == set(second.scheduled) == {None}


def test_a_backend_that_plans_on_the_host_gets_its_half_or_says_what_is_missing():
    """Padding included: both halves of a bucket are told as many lengths as they have rows."""
    config, lens = TREES["tree"], lengths(3)
    first, second = spy("first", host_plan=True), spy("second", host_plan=True)
    one = world(tbo("torch_native", (first, second)), [4], config)
    good = run(one, lens, config, torch.tensor(lens, dtype=torch.int32))
    assert (first.scheduled[-1], second.scheduled[-1]) == (lens[:2], [lens[2], 0])
    with pytest.raises(UnsupportedError, match="backend 'first': needs seq_lens_cpu"):
        run(one, lens, config, None)
    identical(run(one, lens, config, torch.tensor(lens, dtype=torch.int32)), good)


@pytest.mark.parametrize("config", TREES.values(), ids=TREES)
def test_masks_are_row_exact_slices(config):
    """Those of padded rows too: they see themselves, and what is before them in a chain."""
    one = world(tbo("torch_native"), [8], config)
    lens, nodes = lengths(3), config.num_draft_tokens
    run(one, lens, config, None)
    given = verify_inputs(lens, config)["words"]
    node = torch.arange(nodes, device=DEVICE)
    causal = (2 << node) - 1
    (bound, *_) = one.step(VERIFY, 8).verify_attention.bounds
    first, second = (plan.tail_words for plan in bound.plans)
    assert torch.equal(first[:3], given)
    for padded in (*first[3:], *second):
        assert (padded[:, 0] >> node & 1).all(), "every node sees itself"
        assert torch.equal(padded[:, 0], causal) or config.topk > 1
