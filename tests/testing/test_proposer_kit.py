"""The proposers' part of the kit: what is shipped passes, and each mutant breaks its rule."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from specattn.config import SpecConfig
from specattn.speculative.proposers.lookup import LookupFirst, LookupProposer
from specattn.speculative.proposers.standalone import LMDraft
from specattn.testing import ConformanceError, proposer_conformance, proposers
from specattn.testing.proposers import CONFIGS
from specattn.testing.world import accept
from tests.samples import on_cpu
from tests.testing import mutants as m
from tests.tiny import VOCAB, TinyBlockDraft, TinyDraft, TinyTarget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TARGET = TinyTarget(layers=1, device=DEVICE)
LM = TinyTarget(window=6, seed=5, device=DEVICE)

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
RULES = len(list(proposer_conformance(SHIPPED[0], TARGET, configs=CONFIGS[:1])))


def in_turns(at: int) -> bool:
    """Every second rule with one config, the others with the next one."""
    return sum(divmod(at, RULES)) % 2 == 0


@on_cpu(in_turns, "check")
@pytest.mark.parametrize(
    "check",
    [
        *(check for draft in SHIPPED for check in proposer_conformance(draft, TARGET)),
        # drafts with probabilities per depth
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


@pytest.mark.parametrize("config", CONFIGS)
def test_an_honest_lookup_keeps_whole_drafts_and_parts(config, monkeypatch) -> None:
    """Else nobody looks at what it does with them."""
    kept = []

    def counting(step, tree):
        accepted = accept(step, tree)
        kept.extend(accepted.accept_lens.tolist())
        return accepted

    monkeypatch.setattr(proposers, "accept", counting)
    checks = proposer_conformance(LookupProposer(1, 3), TARGET, configs=[config])
    (repeats,) = (check for check in checks if check.name.startswith("repeats"))
    repeats()
    assert config.num_steps + 1 in kept
    assert set(kept) & {*range(2, config.num_steps + 1)}


TREE = SpecConfig(3, 2, 7, 128, 3, page_size=4)
ALONE = r"request \d of \d is drafted \[\[.*, alone over new buffers .* follow from its text alone$"
PLACES = r"^[^:]*: [^:]*: request \d of \d gets tokens .*, alone it gets .* from its text alone$"
# mutant, and what the kit must say of the rules that it breaks
MUTANTS = [
    (m.MutantProposer, {}),
    (
        m.CountsPositionsFromTheChunk,
        {
            "prompts in chunks": "k_cache of layer 0 of prompt 0 of 3, in chunks of 12, differs",
            "cached prefixes": "k_cache of layer 0 differs",
        },
    ),
    (
        m.GivesPromptsTheFirstOnesState,
        {"prompts in chunks": "topk_probs of prompt 2 of 3, in chunks of 12, differs"},
    ),
    (
        m.ForgetsTheBonusToken,
        {"step by step": "k_cache of layer 0 of request 0, whose text was a prompt, differs"},
    ),
    (
        m.ForgetsTheBonusTokenOfCaptures,
        {"prompts as captures": "k_cache of layer 0 of prompt 1 of 3, in captured .* differs"},
    ),
    (
        m.ReadsPaddingOfCaptures,
        {"prompts as captures": "k_cache of layer 0 behind cached tokens differs"},
    ),
    (m.GivesAllTheFirstOnesState, {"step by step": "topk_probs of request 0, .* differs"}),
    (m.ChoosesOnTheHost, {"host reads": "_local_scalar_dense reads a value"}),
    (
        m.WritesMoreThanItSays,
        {"writes outside the window": "k_cache of layer 0 of the draft changed at"},
    ),
    (
        m.ReadsTheLastRow,
        {"step by step": "topk_probs of request", "rows past the accepted": "topk_probs differs"},
    ),
    (m.KeepsStatesInAnAttribute, {"same drafts": ALONE}),
    (m.KeepsStatesByRow, {"same drafts": r"whose text was a prompt, is drafted .*, after steps"}),
    (m.MutantBlock, {}),
    (m.LeavesTokensInTheBlock, {"same drafts": ALONE}),
    (m.MutantLookup, {}),
    (m.ReadsPastTheText, {"same drafts": ALONE}),
    (m.LosesTheLastToken, {"step by step": "text of request 0, whose text was a prompt, differs"}),
    (m.BoundArithmetic, {}),
    (m.GivesAllTheFirstOnesTokens, {"same drafts": ALONE}),
    (m.CopiesAView, {"same drafts": ALONE}),
    (m.SharesFlatMemory, {"whole trees": r"tree.tokens must be 0\.\.60, got"}),
    (m.RepeatsTheNewest, {}),
    (m.ForgetsTheDepth, {"trees of the host": "request 0: tokens must be at most 6, got 7"}),
    (m.WritesIntoTheText, {"trees of the host": "it has written into the tokens of a request"}),
    (m.ReversesTheTrees, {"same drafts": PLACES}),
    (m.FillsOneList, {"same drafts": PLACES}),
    (m.KeepsTextsByPlace, {"same drafts": PLACES}),
    (
        m.KeepsTextsByAddress,
        {"same drafts": r"(others ended|with \d+ new tokens) gets .*, (before it|a prompt) gets"},
    ),
    (m.ReadsATextOnce, {"same drafts": "a request with 1 new tokens gets .*, a prompt gets"}),
]


def made(mutant: type) -> object:
    """Return the draft whose proposer is a mutant."""
    if issubclass(mutant, m.MutantProposer):
        return mutant.draft(LM)
    if issubclass(mutant, m.MutantBlock):
        return mutant.draft(TinyBlockDraft(device=DEVICE))
    if issubclass(mutant, m.BoundArithmetic):
        return m.ArithmeticProposer(mutant)
    return mutant(1, 3) if issubclass(mutant, m.MutantLookup) else mutant()


@pytest.mark.parametrize(("mutant", "said"), MUTANTS)
def test_a_mutant_breaks_its_rules_and_no_other(mutant, said) -> None:
    draft, found = made(mutant), {}
    for check in proposer_conformance(draft, TARGET, configs=[TREE]):
        try:
            check()
        except ConformanceError as error:
            found[error.broken] = str(error), check.name
    assert found.keys() == said.keys()
    for rule, (message, name) in found.items():
        assert message.startswith(f"{rule}: proposer {type(draft).__name__!r} in {name}: ")
        assert re.search(said[rule], message), message
