"""R03: sglang#24319, sglang#24212; also sglang#7225, sglang#7569.

Splitting a verify batch in two cut its dense mask, whose offsets are sums of lengths on the host;
the overlapped scheduler had none: ``split_spec_info: seq_lens_cpu is None``.

A mask here is words per request, so that the split is a slice: no length is read, on the host or
elsewhere. Only a backend that plans on the host asks for lengths, by name, and gets its half.
"""

from __future__ import annotations

import pytest
import torch

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
    one = world(backend, [4], config, tbo=True)
    for size in (3, 1, 4):
        lens = lengths(size)
        given = run(one, lens, config, torch.tensor(lens, dtype=torch.int32))
        absent = run(one, lens, config, None)
        identical(absent, given)
        assert not absent["logits"].isnan().any()


def test_no_lengths_stay_no_lengths():
    noted = spy("noted")
    config = TREES["tree"]
    one = world(noted, [4], config, tbo=True)
    noted.scheduled.clear()
    run(one, lengths(3), config, None)
    assert set(noted.scheduled) == {None}


def test_a_backend_that_plans_on_the_host_gets_its_half_or_says_what_is_missing():
    """Padding included: both halves of a bucket are told as many lengths as they have rows."""
    config, lens = TREES["tree"], lengths(3)
    planned = spy("planned", host_plan=True)
    one = world(planned, [4], config, tbo=True)
    planned.scheduled.clear()
    good = run(one, lens, config, torch.tensor(lens, dtype=torch.int32))
    kinds = len(set(one.decoder.target.model.layers))
    assert planned.scheduled == [lens[:2]] * kinds + [[lens[2], 0]] * kinds
    with pytest.raises(UnsupportedError, match="backend 'planned': needs seq_lens_cpu"):
        run(one, lens, config, None)
    identical(run(one, lens, config, torch.tensor(lens, dtype=torch.int32)), good)


@pytest.mark.parametrize("config", TREES.values(), ids=TREES)
def test_masks_are_row_exact_slices(config):
    """Those of padded rows too: they see themselves, and what is before them in a chain."""
    one = world("torch_native", [8], config, tbo=True)
    lens, nodes = lengths(3), config.num_draft_tokens
    run(one, lens, config, None)
    given = verify_inputs(lens, config)["words"]
    node = torch.arange(nodes, device=DEVICE)
    causal = (2 << node) - 1
    first, second = (step.verify_attention.plan.tail_words for step in one.steps(VERIFY, 8))
    assert torch.equal(first[:3], given)
    for padded in (*first[3:], *second):
        assert (padded[:, 0] >> node & 1).all(), "every node sees itself"
        assert torch.equal(padded[:, 0], causal) or config.topk > 1
