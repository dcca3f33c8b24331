"""The command under `torchrun`: one target on two processes, one output."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from specattn.cli.loading import pick_device
from tests.cli.command import PROMPT, ROOT, plain_tokens, run
from tests.ranks import needs_shards

RANK_1 = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
RANK_0 = RANK_1 | {"RANK": "0", "LOCAL_RANK": "0"}


@needs_shards
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="its ranks would need two GPUs")
def test_two_ranks_write_one_text():
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2 -m specattn generate"
    ran = subprocess.run(
        [sys.executable, *launch.split(), PROMPT, "--max-new-tokens", "8", "--json"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["tokens"] == plain_tokens(PROMPT, 8)
    assert (found["finish_reason"], found["fused"]) == ("length", ["target", "draft"])


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["-"], "PROMPT: cannot be standard input under torchrun: ranks share it"),
        (["--device", "meta", "a"], "--device: must be auto or c"),
    ],
)
def test_rank_0_alone_tells_of_a_mistake(args, error):
    told = run("generate", *args, stdin="a", env=RANK_0)
    assert (told.exit_code, told.stdout) == (2, "")
    assert told.stderr.startswith(f"specattn: error: {error}")
    silent = run("generate", *args, stdin="a", env=RANK_1)
    assert (silent.exit_code, silent.stdout, silent.stderr) == (2, "", "")


def test_every_rank_has_a_gpu_of_its_own(monkeypatch):
    for name, value in RANK_1.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Exception, match="there is no cuda:1: torch sees 1 CUDA devices"):
        pick_device("auto")
