"""Every Triton kernel compiles for GPUs that are not there, and fits into them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from specattn.kernels.attention.tiles import (
    HOPPER,
    RESERVED,
    DeviceLimits,
    TileConfig,
    extend_tile_config,
    tile_config,
)

ROOT = Path(__file__).parents[2]
KB = 1024
SHARED = {80: 163 * KB, 86: 99 * KB, 89: 99 * KB, 90: 227 * KB, 100: 227 * KB}
# a few values around a loop, not an accumulator within it
MOST_SPILLED = 512


def launched_kernels() -> set[str]:
    """Names of the Triton kernels that the library launches."""
    found = set()
    for path in (ROOT / "specattn" / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("kernel"):
                decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
                if any(decorator.startswith("triton.jit") for decorator in decorators):
                    found.add(node.name)
    return found


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


def compile_quickly(tmp_path: Path, targets: str, only: str = "") -> list[dict[str, Any]]:
    """In a process of its own: here Triton may be interpreting."""
    out = tmp_path / "records.json"
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "bench.compile_targets",
            "--quick",
            "--targets",
            targets,
            "--only",
            only,
            "--out",
            str(out),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    records = json.loads(out.read_text())["records"]
    for record in records:
        assert record["shared"] <= SHARED[record["target"]], record
        assert record["stack"] <= MOST_SPILLED, record
    return records


def test_every_kernel_compiles_for_every_target(tmp_path: Path) -> None:
    """By Triton and ptxas. Triton makes the same of a kernel for SM89 as for SM86, but float8."""
    records = compile_quickly(tmp_path, "80,86,90,100")
    for target in (80, 86, 90, 100):
        found = {record["kernel"] for record in records if record["target"] == target}
        assert found == launched_kernels(), target
    found = {record["kernel"] for record in compile_quickly(tmp_path, "89", "float8")}
    assert "tree_attention_kernel" in found


def test_tiles_of_other_devices_have_legal_sizes() -> None:
    shapes = product(
        (1, 16, 32, 64, 256, 800),
        (64, 96, 128, 256),
        (64, 128, 256),
        (torch.bfloat16, torch.float32),
        SHARED.items(),
    )
    for rows, dim, v_dim, dtype, (target, shared) in shapes:
        limits = DeviceLimits(100, shared, target // 10)
        for tile in (
            tile_config(rows, dim, v_dim, dtype, 8, limits),
            extend_tile_config(dim, v_dim, dtype, limits),
        ):
            where = (rows, dim, v_dim, dtype, target, tile)
            assert tile.block_m >= 16, where
            assert tile.block_n >= 16, where
            assert tile.stages >= 2, where
            keys = tile.stages * tile.block_n * (dim + v_dim) * dtype.itemsize
            assert tile.ctas_per_sm * keys <= shared + RESERVED or target == 90, where


@pytest.mark.parametrize(
    ("rows", "dim", "batch", "tile"),
    [
        (16, 128, 8, TileConfig(16, 64, ctas_per_sm=3, max_regs=168)),
        (64, 128, 8, TileConfig(64, 64, max_regs=192)),
        (256, 128, 8, TileConfig(128, 128, warps=8, ctas_per_sm=1)),
        (64, 256, 8, TileConfig(64, 32, stages=4, ctas_per_sm=1)),
    ],
)
def test_hopper_keeps_its_table(rows: int, dim: int, batch: int, tile: TileConfig) -> None:
    """What was measured there does not change with what others need."""
    assert tile_config(rows, dim, dim, torch.bfloat16, batch, HOPPER) == tile
