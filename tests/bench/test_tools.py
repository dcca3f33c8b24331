"""Tools that run checkouts: what they record, compare and count."""

from __future__ import annotations

import json
import sys

import pytest

from bench.tools import texts


def test_texts_are_recorded_by_the_command_line_and_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(texts, "CONFIGS", {"chain": texts.CONFIGS["chain"]})
    out = tmp_path / "new.json"
    run = ["texts", "--out", str(out), "--prompts", "1", "--new", "6"]
    monkeypatch.setattr(sys, "argv", run)
    texts.main()
    found = json.loads(out.read_text())
    assert list(found) == ["chain, greedy, prompt 0", "chain, drawn, prompt 0"]
    for one in found.values():
        assert (len(one["tokens"]), one["finish_reason"]) == (6, "length")
    other = tmp_path / "old.json"
    found["chain, drawn, prompt 0"]["tokens"][2] += 1
    del found["chain, greedy, prompt 0"]
    other.write_text(json.dumps(found))
    monkeypatch.setattr(sys, "argv", ["texts", "--against", str(other), str(out)])
    with pytest.raises(SystemExit, match="True"):
        texts.main()
    said = capsys.readouterr().out
    assert "chain, greedy, prompt 0: in one recording only" in said
    assert "chain, drawn, prompt 0: tokens differ, from token 2" in said
