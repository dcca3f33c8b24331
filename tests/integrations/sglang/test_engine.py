"""Greedy tokens and verify counts of a whole `sglang.Engine` on a CPU."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.sglang.engine import NEW, PAIR, SETTINGS, prompts

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.sglang
SPECULATIVE = [name for name in SETTINGS if name != "plain"]


@functools.cache
def run(setting: str, backend: str = "specattn") -> dict:
    """Run a setting in a process of its own."""
    paths = [str(ROOT), str(ROOT / "tests/integrations/sglang/stubs")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.sglang.engine", setting, backend],
        cwd=ROOT,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(paths),
            "SGLANG_USE_CPU_ENGINE": "1",
            "TRITON_INTERPRET": "1",
        },
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


def tokens(results: list[dict]) -> list[list[int]]:
    return [result["tokens"] for result in results]


@pytest.mark.parametrize("setting", SPECULATIVE)
def test_tokens_are_those_without_speculation(setting):
    expected = tokens(run("plain")["first"])
    assert [len(text) for text in expected] == [NEW] * len(expected)
    assert tokens(run(setting)["first"]) == expected


def test_plain_tokens_are_those_of_sglangs_own_backend():
    assert tokens(run("plain")["first"]) == tokens(run("plain", "torch_native")["first"])


def test_tokens_after_others_were_aborted():
    """The radix cache has the prompts by then."""
    assert "abort" in run("4-2-8")["aborted"]
    after = run("4-2-8")["after abort"]
    assert tokens(after) == tokens(run("plain")["first"])
    assert all(result["cached"] for result in after)


@pytest.mark.parametrize("setting", ["chain", "4-5-16", "4-2-8", "4-2-8 pages", "two ranks"])
def test_verify_counts_are_those_of_this_librarys_engine(setting):
    """Both read true ancestors, so both accept the same paths."""
    assert [result["verified"] for result in run(setting)["first"]] == own_steps(setting)


def own_steps(setting: str) -> list[int]:
    import torch

    from specattn import Engine, Request, SpecConfig
    from specattn.models import HFTarget, load_draft

    _, steps, topk, nodes, page = SETTINGS[setting]
    target = HFTarget.from_pretrained(str(PAIR / "target"), dtype=torch.float32)
    draft = load_draft(str(PAIR / "draft"), target, dtype=torch.float32)
    target = target.with_features(draft.features)
    engine = Engine(target, draft, SpecConfig(steps, topk, nodes, 256, 4, page), buckets=[4])
    out = engine.generate([Request(prompt, NEW, ignore_eos=True) for prompt in prompts()])
    return [result.steps for result in out]


@pytest.mark.parametrize("setting", ["4-5-16", "4-2-8"])
def test_report_beside_sglangs_triton_backend(setting, record_property):
    """Branches of its drafts read their own beam's slots (sglang#7523)."""
    found = {name: run(setting, name)["first"] for name in ("specattn", "triton")}
    assert tokens(found["triton"]) == tokens(found["specattn"])
    counts = {name: [one["verified"] for one in of] for name, of in found.items()}
    record_property("verified", {setting: counts})
    assert sum(counts["specattn"]) <= sum(counts["triton"])
