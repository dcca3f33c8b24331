"""The cases of the sanitizer run, here in the interpreter, and its parser reads the tools."""

from __future__ import annotations

import pytest
import torch

from bench.tools import sanitize_attention, sanitize_small, sanitize_step
from bench.tools.sanitize import parse
from bench.tools.sanitize_world import DEVICE, F16, F32, World
from tests.implementations import using


@pytest.mark.parametrize(
    "call",
    [
        lambda: sanitize_attention.attend(4, 4, F16, triton=True),
        lambda: sanitize_attention.attend(8, 24, F32, window=20, cap=9.0),
        lambda: sanitize_attention.attend(2, 2, F16, page=16),
        lambda: sanitize_attention.attend_lists(F16, triton=True),
        lambda: sanitize_attention.attend_deterministic(2, 2, F16),
        lambda: sanitize_attention.prompt(F16, window=20, triton=True),
        sanitize_small.small,
    ],
    ids=["tree", "window", "page", "lists", "fixed", "prompt", "small"],
)
def test_cases_run(call):
    torch.manual_seed(0)
    with using("triton"):
        call()


@pytest.mark.skipif(DEVICE == "cuda", reason="there bench.tools.sanitize itself runs them")
@pytest.mark.parametrize(
    "call",
    [
        sanitize_small.pool_dtypes,
        sanitize_step.states,
        lambda: sanitize_step.path(F32, F16),
        lambda: sanitize_step.plans(5),
        lambda: sanitize_step.choices(33, F16),
        lambda: sanitize_step.processing(33, F16),
        lambda: sanitize_step.log_probs(33, F16),
        lambda: sanitize_step.draws(33, F16),
        lambda: sanitize_step.layer(3, F16),
        lambda: sanitize_step.rotation(6, 1, 24, 3, F16),
    ],
    ids=[
        "dtypes",
        "states",
        "path",
        "plans",
        "choices",
        "processors",
        "log-probabilities",
        "draws",
        "layer",
        "rotation",
    ],
)
# what is infinitely far below the largest logit overflows, as it should
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_cases_of_a_step_run(call):
    with using("triton"):
        call()


def test_worlds_are_as_small_as_they_can_be():
    """Nothing past the longest request, no slot past the last page."""
    world = World(4, 4, lens=(0, 17, 33), page=16)
    assert world.width == 48
    assert int(world.table.max()) < world.slots
    assert int(world.used.sum()) == (1 + 2 + 3) * 16
    assert (world.tails[2] == world.table[3, 33:37]).all()


MEMCHECK = """
========= COMPUTE-SANITIZER
ran small: operations
========= Invalid __global__ read of size 4 bytes
=========     at _store_kernel+0x1b0 in kv_store.py:40
=========     by thread (1,0,0) in block (0,0,0)
========= Invalid __global__ read of size 4 bytes
=========     at _store_kernel+0x2b0 in kv_store.py:40
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """
========= Error: Race reported between Write access at merge_kernel+0x90
=========     and Read access at merge_kernel+0xa0 [4 hazards]
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def test_summaries_are_read():
    found = parse(MEMCHECK)
    assert (found["errors"], found["warnings"]) == (2, 0)
    assert found["reports"] == [
        {
            "text": "Invalid __global__ read of size 4 bytes"
            " / at _store_kernel+0x… in kv_store.py:40",
            "times": 2,
        },
    ]
    found = parse(RACECHECK)
    assert (found["errors"], found["warnings"]) == (1, 1)
    assert "merge_kernel" in found["reports"][0]["text"]
    assert parse("nothing at all")["errors"] is None
    assert (
        parse("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")["errors"]
        == 0
    )
