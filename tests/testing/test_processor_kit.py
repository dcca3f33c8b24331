"""The processors' part of the kit: good ones pass, and each mutant breaks its rule."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from specattn.testing import ConformanceError, processor_conformance
from tests.own_processors import Budget, ForgetsThePath, LastPenalty, NoNgram

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))
from own_processor import Vary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GOOD = [
    (LastPenalty(), (1.0, -2.0)),
    (NoNgram(1), (None,)),
    (NoNgram(2), (None,)),
    (NoNgram(4), (None,)),
    (Budget(), ((3, 1), (4, 2))),
    (Vary(), (0.5, 2.0)),
]


@pytest.mark.parametrize(
    "check",
    [check for one, params in GOOD for check in processor_conformance(one, params, device=DEVICE)],
    ids=lambda check: f"{check.backend}-{check.name}",
)
def test_good_ones_keep_the_rules(check) -> None:
    check()


class InPlace(LastPenalty):
    def process(self, logits, nodes, states):
        return logits.sub_(states["penalty"][:, None])


class Remembers(LastPenalty):
    """Whoever was admitted last has every request's penalty."""

    def admit(self, states, params, prompt):
        self.amount = params

    def process(self, logits, nodes, states):
        states = {"penalty": torch.full_like(states["penalty"], self.amount)}
        return super().process(logits, nodes, states)


class ReadsTheHost(LastPenalty):
    def process(self, logits, nodes, states):
        return super().process(logits, nodes, states) if states["penalty"].any() else logits


class CountsAll(Budget):
    """What comes after the emitted tokens is counted, too."""

    def note(self, states, tokens, lens):
        return {"left": states["left"] - (tokens == states["token"]).sum(1, keepdim=True)}


class Nothing(LastPenalty):
    def process(self, logits, nodes, states):
        return logits.clone()


class KeepsAnAttribute(Budget):
    """The path of a tree is counted as if it were emitted, and by all."""

    seen = 0

    def process(self, logits, nodes, states):
        self.seen = self.seen + 1
        return super().process(logits - self.seen, nodes, states)


MUTANTS = [
    (InPlace(), (1.0,), {"inputs unchanged"}),
    (Remembers(), (1.0, -2.0), {"states of its own"}),
    (ReadsTheHost(), (1.0,), {"host reads"}),
    (ForgetsThePath(), (1.0,), {"each node's own history"}),
    (CountsAll(), ((3, 1), (4, 2)), {"tokens past the emitted"}),
    (Nothing(), (1.0,), {"changes something"}),
    (
        KeepsAnAttribute(),
        ((3, 1),),
        {"each node's own history", "states of its own", "tokens past the emitted"},
    ),
]


@pytest.mark.parametrize(("mutant", "params", "rules"), MUTANTS)
def test_a_mutant_breaks_its_rules_and_no_other(mutant, params, rules) -> None:
    found = {}
    for check in processor_conformance(mutant, params, device=DEVICE):
        try:
            check()
        except ConformanceError as error:
            found[error.broken] = str(error), check.name
    assert found.keys() == rules
    for rule, (message, name) in found.items():
        assert message.startswith(f"{rule}: processor '{mutant.name}' in {name}: ")
