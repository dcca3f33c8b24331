"""Recorded steps draw from the target's distribution: many seeds at once, greedy ones among them.

Every round puts the states back to where the prompts left them, gives each request another seed,
and steps whoever lacks tokens, in another order and company each time, until three are out.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from specattn.engine.engine import Engine, Request
from specattn.speculative.step import verify
from specattn.speculative.step.level import Level, StepPart
from tests.distributions import p_value as p_value_of
from tests.speculative import three_tokens
from tests.speculative.three_tokens import DEVICE, PROMPT, SETTINGS, TEMPERATURE, TOP_K
from tests.tiny import dense_greedy

if TYPE_CHECKING:
    from tests.distributions import Distribution

pytestmark = pytest.mark.gpu

ROWS, ROUNDS = 250, 60
# requests of a round that stay greedy
GREEDY = 25


@pytest.fixture(scope="module")
def models():
    return three_tokens.make_models()


@pytest.fixture(scope="module")
def greedy(models) -> list[int]:
    return dense_greedy(models[0], PROMPT, 4)


@pytest.fixture(scope="module")
def wanted(models, greedy) -> Distribution:
    """Of what follows the prompt and its greedy token."""
    return three_tokens.distribution(models[0], [*PROMPT, greedy[0]])


class Rounds:
    """An engine's decoder, and the states that its prompts left."""

    def __init__(self, models, config, cudagraph) -> None:
        self.run = Engine(*models, config, buckets=[32, ROWS], cudagraph=cudagraph)
        self.run.add([Request(PROMPT, 20) for _ in range(ROWS)])
        self.rows = [live.row for live in self.run.running]
        self.run.table.reserve(self.rows, [config.max_context_len] * ROWS)
        self.decoder = self.run.decoder(config)
        self.decoder.capture(sampled=True)
        self.states = self.run.states
        self.left = {name: value.clone() for name, value in self.states.tensors().items()}
        self.rng = random.Random(4)

    def draw(self, number: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return three tokens of every request: of those that draw, and of the greedy ones."""
        for name, value in self.states.tensors().items():
            value.copy_(self.left[name])
        rows = self.rng.sample(self.rows, ROWS)
        drawing = torch.tensor(rows[GREEDY:], device=DEVICE)
        seeds = torch.arange(len(drawing), device=DEVICE)
        self.states.seeds[drawing] = 7919 + number * ROWS + seeds
        self.states.temperature[drawing] = TEMPERATURE
        self.states.top_k[drawing] = TOP_K
        texts: dict[int, list[int]] = {row: [] for row in rows}
        while going := [row for row in rows if len(texts[row]) < 3]:
            self.rng.shuffle(going)
            for row, new in zip(going, self.decoder.step(going, sampled=True), strict=True):
                texts[row] += new
        found = [tuple(texts[row][:3]) for row in rows]
        return found[GREEDY:], found[:GREEDY]


def p_value(models, wanted, greedy, name, cudagraph="full") -> float:
    config = SETTINGS[name]
    rounds = Rounds(models, config, cudagraph)
    drawn: list[tuple[int, ...]] = []
    for number in range(ROUNDS):
        new, others = rounds.draw(number)
        assert set(others) == {tuple(greedy[1:])}, "a greedy request was drawn for"
        drawn += new
    if DEVICE == "cuda":
        runner = rounds.decoder.runner
        for part in StepPart.of(config, Level.SAMPLED, piecewise=cudagraph == "piecewise"):
            assert runner.recorded(part), f"{part.value} is not replayed"
            assert runner.stats.replays[part] >= ROUNDS
        assert not runner.stats.eager
    assert len(drawn) == ROUNDS * (ROWS - GREEDY)
    return p_value_of(drawn, wanted)


@pytest.mark.parametrize("name", SETTINGS)
def test_one_graph_keeps_the_joint_distribution(models, wanted, greedy, name):
    assert p_value(models, wanted, greedy, name) > 1e-3


@pytest.mark.parametrize("name", ["tree", "rejection"])
def test_three_graphs_keep_it_too(models, wanted, greedy, name):
    assert p_value(models, wanted, greedy, name, "piecewise") > 1e-3


def test_one_coin_for_both_decisions_is_noticed(models, wanted, greedy, monkeypatch):
    """The control, biased in the recorded graph."""
    monkeypatch.setattr(verify, "FINAL", verify.ACCEPT)
    assert p_value(models, wanted, greedy, "tree") < 1e-9


def test_accepting_every_draft_is_noticed(models, wanted, greedy, monkeypatch):
    three_tokens.accept_every_draft(monkeypatch)
    assert p_value(models, wanted, greedy, "rejection") < 1e-9
