"""Every kernel compiles for GPUs that are not there, and fits into them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import triton
from triton.runtime.interpreter import InterpretedFunction

from bench.tools.compile_cases import QUICK
from specattn.kernels.attention.tiles import HOPPER, DeviceLimits

ROOT = Path(__file__).parents[2]
KB = 1024
SHARED = {80: 163 * KB, 86: 99 * KB, 89: 99 * KB, 90: 227 * KB, 100: 227 * KB}
# a few values around a loop, not an accumulator within it
MOST_SPILLED = 512
# cases that compile in one process, which costs a start
FAMILIES = {
    "attention": [
        "64 rows, window, cap, lse, f16",
        "256 rows, bf16",
        "plans of a step",
        "16 rows, index lists, bf16",
        "deterministic, 64 rows, bf16",
    ],
    "float8": ["64 rows, float8 keys, bf16"],
    "prompt": [
        "prompt, bf16",
        "latent prompt, bf16",
        "latent, 16 rows, bf16",
        "latent, 64 rows, bf16",
    ],
    "gluon": [name for name in QUICK if "gluon" in name],
}
FAMILIES["others"] = [n for n in QUICK if not any(n in names for names in FAMILIES.values())]
# Hopper's on every run. Triton makes the same of a kernel for SM89 as for SM86, but float8; tiles
# of attention alone depend on what an SM has, and SM80's are between these.
OTHERS = {"gluon": (), "float8": (89, 100), "others": (80,)}
TARGETS = [pytest.param(family, (90,), id=f"{family}-sm_90") for family in FAMILIES] + [
    pytest.param(family, targets, id=f"{family}-others", marks=pytest.mark.slow)
    for family in FAMILIES
    if (targets := OTHERS.get(family, (86, 100)))
]


def written_kernels() -> set[str]:
    """Names of the kernels in the library's source."""
    found = set()
    for path in (ROOT / "specattn" / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("kernel"):
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                if any(
                    decorator.startswith(("triton.jit", "gluon.jit")) for decorator in decorators
                ):
                    found.add(node.name)
    return found


def test_every_kernel_is_among_the_cases() -> None:
    """Launched by one of them, that is; the cases of `FAMILIES` are all of them."""
    launched = set()

    def note(kernel: Any, grid: Any) -> Any:
        launched.add(kernel.fn.__name__)
        return lambda *args, **options: None

    kinds = (InterpretedFunction, triton.runtime.jit.KernelInterface)
    with (
        mock.patch("specattn.kernels.uses_triton", return_value=True),
        mock.patch.object(DeviceLimits, "of", return_value=HOPPER),
        mock.patch.object(kinds[0], "__getitem__", note),
        mock.patch.object(kinds[1], "__getitem__", note),
    ):
        for case in QUICK.values():
            case()
    assert launched == written_kernels()


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("family", "targets"), TARGETS)
def test_it_compiles(tmp_path: Path, family: str, targets: tuple[int, ...]) -> None:
    """By Triton and ptxas, in a process of its own: here Triton may be interpreting."""
    out = tmp_path / "records.json"
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    options = ["--quick", "--targets", ",".join(map(str, targets)), "--out", str(out)]
    for name in FAMILIES[family]:
        options += ["--case", name]
    run = subprocess.run(
        [sys.executable, "-m", "bench.tools.compile_targets", *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    records = json.loads(out.read_text())["records"]
    compiled = {(record["case"], record["target"]) for record in records}
    assert compiled == {(name, target) for name in FAMILIES[family] for target in targets}
    for record in records:
        assert record["shared"] <= SHARED[record["target"]], record
        assert record["stack"] <= MOST_SPILLED, record
        if (record["case"], record["target"]) == ("latent, 16 rows, bf16", 90):
            assert record["shared"] <= 113 * KB, "decoding keeps two CTAs per multiprocessor"


def test_what_may_start_early_waits() -> None:
    """A kernel with a switch for programmatic launch that never waited would read too early."""
    silent = []
    for path in (ROOT / "specattn" / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or not node.name.endswith("kernel"):
                continue
            calls = {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
            switched = "PDL" in {argument.arg for argument in node.args.args}
            if switched and not calls & {"enter", "gdc_wait"}:
                silent.append(node.name)
    assert not silent
