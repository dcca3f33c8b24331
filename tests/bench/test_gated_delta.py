"""The bench of layers with states: its flow and its checks, without a GPU."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace

import pytest

from bench import gated_delta


@pytest.fixture(autouse=True)
def _two_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_delta, "SHAPES", (("chain", True, 3), ("tree", False, 5)))


def test_every_shape_is_compared_and_timed(monkeypatch, capsys):
    monkeypatch.setattr(gated_delta, "on_triton", lambda _: True)
    monkeypatch.setattr(gated_delta, "record", lambda call: call() or SimpleNamespace(median=1e3))
    monkeypatch.setattr(gated_delta, "replay_in_turn", lambda *_: None)
    cells = gated_delta.measured("small", 2, Namespace(rounds=1, sweep=False))
    assert [(cell["shape"], cell["nodes"]) for cell in cells] == [("chain", 3), ("tree", 5)]
    for cell in cells:
        assert cell["both_ms"] == cell["verify_ms"] == 1.0
        assert cell["both_gb_s"] == pytest.approx(cell["verify_gb_s"] + cell["commit_gb_s"])
        assert 0 < cell["out"] < gated_delta.MOST_ERROR
    assert "both_ms 1" in capsys.readouterr().out


def test_a_wrong_output_is_not_timed(monkeypatch):
    verify = gated_delta.verify_nodes
    wrong = lambda *given, **named: 1.1 * verify(*given, **named)  # noqa: E731
    monkeypatch.setattr(gated_delta, "verify_nodes", wrong)
    with pytest.raises(AssertionError, match="small"):
        gated_delta.measured("small", 1, Namespace(rounds=1, sweep=False))


def test_a_commit_that_is_not_that_of_its_nodes_is_not_timed(monkeypatch):
    commit = gated_delta.commit_nodes

    def wrong(nodes, states, *given):
        commit(nodes, states, *given)
        states.mul_(1.0001)

    monkeypatch.setattr(gated_delta, "commit_nodes", wrong)
    with pytest.raises(AssertionError, match="one by one"):
        gated_delta.measured("small", 1, Namespace(rounds=1, sweep=False))
