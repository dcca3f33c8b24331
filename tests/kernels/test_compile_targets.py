"""Every kernel compiles for GPUs that are not there, and fits into them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KB = 1024
SHARED = {80: 163 * KB, 86: 99 * KB, 89: 99 * KB, 90: 227 * KB, 100: 227 * KB}
# a few values around a loop, not an accumulator within it
MOST_SPILLED = 512
# they have nothing but e4m3, which SM80 does not know
FLOAT8_ALONE = {
    "scale_rows_kernel",
    "gate_scale_kernel",
    "gate_heads_scale_kernel",
    "add_norm_scale_kernel",
    "norm_pair_scale_kernel",
    "scaled_linear_kernel",
}
# Triton makes the same of a kernel for SM89 as for SM86, but float8; tiles of attention alone
# depend on what a multiprocessor has. All of a target takes two minutes where no cache has it
TARGETS = [
    ("tests,gluon", (90,), ["--largest"]),
    pytest.param("tests,attention,gluon", (90,), [], marks=pytest.mark.whole),
    pytest.param("tests", (80,), [], marks=pytest.mark.whole),
    pytest.param("attention", (86, 89, 100), [], marks=pytest.mark.whole),
]


def written_kernels(folder: Path) -> set[str]:
    """Names of the kernels in a folder of the library's source."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("kernel"):
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                if any(
                    decorator.startswith(("triton.jit", "gluon.jit")) for decorator in decorators
                ):
                    found.add(node.name)
    return found


@pytest.mark.timeout(0)
@pytest.mark.parametrize(("sources", "targets", "more"), TARGETS)
def test_it_compiles(
    tmp_path: Path, sources: str, targets: tuple[int, ...], more: list[str]
) -> None:
    """By Triton and ptxas, in a process of its own: here Triton may be interpreting."""
    out = tmp_path / "records.json"
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    names = ",".join(map(str, targets))
    options = ["--targets", names, "--sources", sources, "--out", str(out), *more]
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
    every = written_kernels(ROOT / "specattn" / "kernels")
    gluon = {name for name in every if "gluon" in name}
    for target in targets:
        compiled = {record["kernel"] for record in records if record["target"] == target}
        unknown = (FLOAT8_ALONE if target < 89 else set()) | (gluon if target != 90 else set())
        if "tests" in sources:
            assert compiled == every - unknown, "all but those for Hopper alone"
        else:
            assert compiled >= {"tree_attention_kernel"}
    for record in records:
        assert record["shared"] <= SHARED[record["target"]], record
        assert record["stack"] <= MOST_SPILLED, record
        if record["kernel"] == "mla_attention_kernel" and "decode mla16" in record["case"]:
            assert record["target"] != 90 or record["shared"] <= 113 * KB, "two CTAs per SM"


def test_what_may_start_early_waits() -> None:
    """A kernel with a switch for programmatic launch that never waited would read too early."""
    silent = []
    for path in (ROOT / "specattn" / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or not node.name.endswith("kernel"):
                continue
            calls = {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
            switched = "PDL" in {argument.arg for argument in node.args.args}
            if switched and not calls & {"enter", "follow", "gdc_wait"}:
                silent.append(node.name)
    assert not silent
