"""The proposers' part of the kit: what is shipped passes, and each mutant breaks its rule."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from specattn.config import SpecConfig
from specattn.speculative.lookup import LookupFirst, LookupProposer
from specattn.speculative.standalone import LMDraft
from specattn.testing import ConformanceError, proposer_conformance
from tests.testing import mutants as m
from tests.tiny import VOCAB, TinyBlockDraft, TinyDraft, TinyTarget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TARGET = TinyTarget(device=DEVICE)
LM = TinyTarget(layers=3, window=6, seed=5, device=DEVICE)

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))
from bigram_proposer import BigramProposer  # noqa: E402
from suffix_proposer import SuffixProposer  # noqa: E402

BEST_FIRST = SpecConfig(3, 1, 7, 128, 3, tree="best_first", ranks=4)
SHIPPED = [
    TinyDraft(device=DEVICE),
    LMDraft(LM, VOCAB),
    TinyBlockDraft(device=DEVICE),
    LookupProposer(1, 3),
    LookupFirst(LookupProposer(1, 3), LMDraft(LM, VOCAB)),
    BigramProposer(torch.randint(VOCAB, (500,)), VOCAB, 2, DEVICE),
    SuffixProposer(),
]


@pytest.mark.parametrize(
    "check",
    [
        *(check for draft in SHIPPED for check in proposer_conformance(draft, TARGET)),
        # drafts with a law per depth
        *(
            check
            for draft in SHIPPED[:3]
            for check in proposer_conformance(draft, TARGET, configs=[BEST_FIRST])
        ),
    ],
    ids=lambda check: f"{check.backend}-{check.name}",
)
def test_what_is_shipped_keeps_the_rules(check) -> None:
    check()


# mutant, the rules that the kit must find broken
MUTANTS = [
    (m.MutantProposer, set()),
    (m.CountsPositionsFromTheChunk, {"prompts in chunks", "cached prefixes"}),
    (m.ForgetsTheBonusToken, {"step by step"}),
    (m.ChoosesOnTheHost, {"host reads"}),
    (m.WritesMoreThanItSays, {"writes outside the window"}),
    (m.ReadsTheLastRow, {"step by step", "rows past the accepted"}),
]


@pytest.mark.parametrize(("mutant", "rules"), MUTANTS)
def test_a_mutant_breaks_its_rules_and_no_other(mutant, rules) -> None:
    found = {}
    for check in proposer_conformance(mutant.draft(LM), TARGET):
        try:
            check()
        except ConformanceError as error:
            found[error.broken] = str(error), check.name
    assert found.keys() == rules
    for rule, (message, name) in found.items():
        assert message.startswith(f"{rule}: proposer 'Draft' in {name}: ")


HOST_MUTANTS = {
    m.ForgetsTheDepth: "ForgetsTheDepth, request 0: tokens must be at most 3, got 4",
    m.WritesIntoTheText: "it has written into the tokens of a request",
}


@pytest.mark.parametrize(("mutant", "message"), HOST_MUTANTS.items())
def test_a_mutant_on_the_host_is_caught(mutant, message) -> None:
    check, other = proposer_conformance(mutant(), TARGET)
    assert check.broken == other.broken == "trees of the host"
    with pytest.raises(ConformanceError, match=message):
        check()
