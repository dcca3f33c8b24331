"""The target of the pair is one that the library loads."""

from __future__ import annotations

import json
import sys

import torch

from bench.tools import train_pair
from bench.tools.train_heads.corpus import is_held_out
from specattn.models import HFTarget


def test_a_target_is_trained_stored_and_loaded(tmp_path, monkeypatch):
    library, out = tmp_path / "library", tmp_path / "target"
    library.mkdir()
    for number in range(60):
        lines = "\n".join(f"    value_{at} = {number} + {at}" for at in range(9))
        (library / f"file_{number}.py").write_text(f"def made_{number}():\n{lines}\n    return 1\n")
    held = [number for number in range(60) if is_held_out(f"file_{number}.py")]
    assert held
    args = ["--stdlib", library, "--out", out, "--device", "cpu", "--steps", 12, "--layers", 1]
    args += ["--length", 32, "--batch-tokens", 512, "--full", 64]
    monkeypatch.setattr(sys, "argv", ["train_pair", *map(str, args)])
    train_pair.main()
    record = json.loads((out / "training.json").read_text())
    nats = [look["nats_per_token"] for look in record["held_out"]]
    assert nats[-1] < 0.9 * nats[0]
    target = HFTarget.from_pretrained(out)
    assert target.dtype == torch.bfloat16
    assert len(target.layers) == 1
    # held-out files have taught the tokenizer nothing
    text = f"def made_{held[0]}():"
    ids = target.tokenizer(text).input_ids
    assert target.tokenizer.decode(ids) == text
    assert f"made_{held[0]}" not in target.tokenizer.get_vocab()
    assert target.tokenizer.eos_token_id == 0 in target.eos_token_ids
