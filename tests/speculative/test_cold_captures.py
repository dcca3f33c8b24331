"""With an empty cache of Triton's, kernels are compiled side by side before they are captured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def last_line(command: list[str], cache: Path, **environment: str) -> Any:
    """Run a module over a cache of Triton's, and read the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(cache)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "models", ["fused", *(pytest.param(one, marks=pytest.mark.whole) for one in ("torch", "fp8"))]
)
def test_a_capture_finds_all_that_it_launches_compiled(models: str, tmp_path: Path) -> None:
    """For SM90, without a GPU: models of this library's kernels, and of torch's operations.

    The latter index by tokens that no kernel has written. Only padding is launched, by a kernel
    and its plan.
    """
    found = last_line(
        ["tests.speculative.cold_capture", models],
        tmp_path,
        TRITON_INTERPRET="0",
        CUDA_VISIBLE_DEVICES="",
    )
    first, then, drawn, drawn_then, again, again_then = found
    for name, compiled, launches, threads in (first, drawn, again):
        assert (name, launches) == ("compile", 2)
        assert (threads > 1) == (compiled > 0)
    for name, compiled, launches, _ in (then, drawn_then, again_then):
        assert (name, compiled) == ("capture", 0)
        assert launches > 50
    assert first[1] > 25
    assert drawn[1] > 5
    # another decoder runs its largest bucket at most
    assert not again[1]


@pytest.mark.gpu
def test_nor_does_a_gpu_compile_while_it_captures(tmp_path: Path) -> None:
    way = ["--start", "side by side", "--tiny", "--layers", "2", "--buckets", "1,2,24"]
    for cold in (True, False):
        found = last_line(["bench.tools.cold_start", *way], tmp_path)
        assert (found["ahead"][1] > 30) == cold
        assert not found["captures"][1]
        assert found["graphs"] == 9
