"""What is timed after each thing that a process does."""

from __future__ import annotations

import pytest
import torch

from bench import two_speeds
from bench.decode_paired import SEAMS
from tests.tiny import TinyDraft, TinyTarget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def process(monkeypatch):
    monkeypatch.setattr(two_speeds, "TREES", {two_speeds.SETTING: (3, 2, 8)})
    monkeypatch.setattr(two_speeds, "CONTEXT", 64)
    monkeypatch.setattr(two_speeds, "TINY", 12)
    models = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    return two_speeds.Process(models, [5, 9, 31, 2, 8], DEVICE)


def test_steps_are_timed_once_there_is_an_engine(process):
    rows = two_speeds.observe(process, ("wait", "engine", "wait"))
    assert [row["after"] for row in rows] == ["start", "wait", "engine", "wait"]
    tiny = {"tiny"} if DEVICE == "cuda" else set()
    for row in rows[:2]:
        assert row.keys() == {"after", *tiny}
    for row in rows[2:]:
        then = {f"{name}, then" for name in tiny}
        assert row.keys() == {"after", *tiny, *SEAMS, *then}
    assert all(us > 0 for row in rows for name, us in row.items() if name != "after")


@pytest.mark.gpu
@pytest.mark.parametrize("name", two_speeds.LISTS)
def test_every_list_is_done(process, name):
    before = float(process.number)
    _, done = two_speeds.LISTS[name]
    rows = two_speeds.observe(process, done)
    assert [row["after"] for row in rows] == ["start", *done]
    replays = sum(key.startswith("tiny") for row in rows for key in row)
    launched = {"launches": 30_000, "stream": 1, "early": 4, "graph": 2 * 300}
    expected = replays * two_speeds.TURNS * two_speeds.REPLAYS * two_speeds.TINY + sum(
        launched.get(action, 0) for action in done
    )
    assert float(process.number) - before == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit):
        two_speeds.main([])
    assert "needs a CUDA device" in capsys.readouterr().err
