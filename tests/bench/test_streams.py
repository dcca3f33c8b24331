"""What is timed after each thing that a process does."""

from __future__ import annotations

import pytest
import torch

from bench import streams
from bench.decode_paired import SEAMS
from tests.tiny import TinyDraft, TinyTarget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def process(monkeypatch):
    monkeypatch.setattr(streams, "TREES", {streams.SETTING: (3, 2, 8)})
    monkeypatch.setattr(streams, "CONTEXT", 64)
    monkeypatch.setattr(streams, "TINY", 12)
    return streams.Process((TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)), [5, 9, 31, 2, 8])


def test_steps_are_timed_before_and_after_each_thing(process):
    seen = []

    def group(_):
        for name in ("first", "second"):
            seen.append(name)
            yield name

    rows = streams.observe(process, group)
    assert [row["after"] for row in rows] == ["start", "start, again", "first", "second"]
    assert seen == ["first", "second"]
    names = {*SEAMS, "tiny"} if DEVICE == "cuda" else set(SEAMS)
    for row in rows:
        assert row.keys() == {"after", *names}
        assert all(row[name] > 0 for name in names)


@pytest.mark.gpu
@pytest.mark.parametrize("name", streams.GROUPS)
def test_every_group_is_observed(process, name):
    before = process._number.clone()
    rows = streams.observe(process, streams.GROUPS[name])
    assert len(rows) > 2
    assert len({row["after"] for row in rows}) == len(rows)
    # every replay has run all of its kernels
    replays = len(rows) * streams.TURNS * streams.REPLAYS
    launched = 3 if name == "streams" else 0
    assert int(process._number - before) == replays * streams.TINY + launched


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit):
        streams.main([])
    assert "needs a CUDA device" in capsys.readouterr().err
