"""What bench/small_ops.py times agrees with its twins on the benchmark's own inputs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from bench.small_ops_cases import GROUPS
from bench.small_ops_step import Step
from bench.small_ops_timing import check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_operations_match_their_twins(group):
    step = Step(2, 3, 3, 7, DEVICE, context=90, vocab=50, layers=2)
    names = Counter()
    for op in group(step):
        names[op.name] += 1
        for nth in range(op.sets):
            assert nth < 64
        check(op)
    assert names
    assert set(names.values()) == {1}


def test_the_walk_is_as_deep_as_the_tree():
    """What is timed as acceptance is the longest path, not an early refusal."""
    step = Step(3, 4, 5, 16, DEVICE, context=90, vocab=50, layers=1)
    accepts = next(op for op in GROUPS[2](step) if op.name == "accept greedy")
    check(accepts)
    depths = (step.tree["positions_out"] - step.lens[:, None]).amax(1)
    assert (step.accepted["accept_lens_out"] > 1).all()
    assert (step.accepted["accept_lens_out"] <= depths + 1).all()
