"""One broken backend per property: the kit fails it, and says which property it breaks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from specattn.backends import load_backend
from specattn.backends.torch_native import TorchNativeBackend
from specattn.errors import UnsupportedError
from specattn.testing import ConformanceError, conformance
from tests.testing import mutants as m

if TYPE_CHECKING:
    from collections.abc import Iterator

# mutant, the property the kit must name, and a property that it must not find broken
MUTANTS = [
    (m.IgnoresTheWindow, "window", "modes"),
    (m.MeasuresTheWindowByRow, "window", "modes"),
    (m.IgnoresTheCap, "cap", "modes"),
    (m.IgnoresTheScale, "scale", "modes"),
    (m.LogOfBaseTwo, "lse", "capabilities"),
    (m.NeedsTheLse, "lse", "modes"),
    (m.TouchesUnusedSlots, "unused memory", "permuted slots"),
    (m.ReadsEvictedKeys, "unused memory", "window"),
    (m.ReadsThePaddingSlot, "padding", "modes"),
    (m.IgnoresLaterWords, "trees", "modes"),
    (m.IsCausal, "modes", "capabilities"),
    (m.TakesSlotsInOrder, "permuted slots", "capabilities"),
    (m.DropsThePartialPage, "pages", "empty prefixes"),
    (m.RemembersTheLengths, "growth", "modes"),
    (m.RemembersTheTree, "new trees", "modes"),
    (m.RemembersThePrefixes, "chunks", "modes"),
    (m.SharesByTheFirstSlot, "shared prefixes", "modes"),
    (m.SharesOnePlan, "buckets", "modes"),
    (m.SharesOnePlan, "draft steps", "growth"),
    (m.InterleavesTheHeads, "heads", "capabilities"),
    (m.LeavesTheLastRow, "written outputs", "capabilities"),
    (m.ServesSixteenRequests, "batches", "modes"),
    (m.AveragesBlindRows, "rows without keys", "modes"),
    (m.AveragesBlindRowsWithoutLse, "rows without keys", "lse"),
    (m.KeepsWhatBlindRowsHeld, "rows without keys", "growth"),
    (m.AttendsToNothing, "rows without keys", "empty prefixes"),
    (m.RoundsTheWeights, "dtypes", "modes"),
    (m.DependsOnTheBatch, "deterministic", "modes"),
    (m.IgnoresTheValuesScale, "stored dtypes", "dtypes"),
    (m.KeepsTheFirstScales, "stored dtypes", "layers"),
    (m.ForgetsTheSinks, "sinks", "modes"),
    (m.AddsTheSinksPerSplit, "sinks", "modes"),
    (m.KeepsTheFirstSinks, "sinks", "layers"),
    (m.LeavesTheSinksOutOfTheLse, "lse", "modes"),
    (m.CachesTheFirstLayer, "layers", "modes"),
    (m.WritesToThePool, "inputs unchanged", "modes"),
    (m.WritesToThePlan, "inputs unchanged", "modes"),
    (m.PlansOnTheHost, "host mirror", "modes"),
    (m.NeedsNoHostMirror, "host mirror", "modes"),
    (m.ServesMoreThanItSays, "capabilities", "modes"),
    (m.TakesPagesOfAnySize, "capabilities", "modes"),
    (m.ServesLessThanItSays, "capabilities", "growth"),
    (m.ReturnsLastResults, "results", "modes"),
    (m.SkipsEmptyPrefixes, "empty prefixes", "modes"),
    (m.ReadsSixtyFourColumns, "head sizes", "modes"),
    (m.ForgetsBeyondTwoThousand, "long prefixes", "modes"),
    (m.ForgetsBeyondFiveThousand, "long prefixes", "modes"),
    (m.ForgetsInLongLists, "long prefixes", "modes"),
    (m.ScalesByThePaddedHeadSize, "head sizes", "scale"),
    (m.TakesValuesAsWideAsKeys, "head sizes", "modes"),
    (m.CutsValuesToTheKeysWidth, "head sizes", "modes"),
    (m.CutsValuesWithoutLse, "head sizes", "lse"),
    (m.ServesGroupsOfEight, "heads", "modes"),
    (m.IgnoresTheCapInWindows, "options together", "cap"),
    (m.SkipsTilesBeforeTheWindow, "window", "modes"),
    (m.IgnoresWordsAfterTheSecond, "trees", "modes"),
    (m.ReadsWordsWhenFilled, "draft steps", "new trees"),
    (m.ReadsListsWhenFilled, "draft steps", "new trees"),
    (m.MasksWithMinusTenThousand, "large logits", "rows without keys"),
    (m.SubtractsNoMaximum, "large logits", "modes"),
    (m.LooksIntoTheFuture, "window", "modes"),
    (m.ReadsEverythingListed, "permuted slots", "trees"),
    (TorchNativeBackend, "bad input", "modes"),
]


def failures(mutant: type, about: str) -> Iterator[ConformanceError]:
    """Run the checks of one property; of the whole kit where any check may find it."""
    anywhere = about in ("unused memory", "written outputs", "lse")
    for check in conformance(mutant, "cpu", validates=about == "bad input", evicts=True):
        if check.broken == about or (anywhere and check.broken in ("modes", "sinks")):
            try:
                check()
            except ConformanceError as error:
                yield error
            except UnsupportedError:
                continue


@pytest.mark.parametrize(
    ("mutant", "broken", "kept"), MUTANTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_the_kit_names_what_a_mutant_breaks(mutant, broken, kept):
    # a mode that is refused though it is declared is found where it runs
    places = [broken, "modes"] if broken == "capabilities" else [broken]
    found = (error for about in places for error in failures(mutant, about))
    error = next((error for error in found if error.broken == broken), None)
    assert error is not None, f"{mutant.__name__} passes"
    assert str(error).startswith(f"{broken}: backend {mutant.name!r} in ")


@pytest.mark.parametrize(
    ("mutant", "broken", "kept"), MUTANTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_and_blames_nothing_else(mutant, broken, kept):
    for error in failures(mutant, kept):
        assert error.broken == broken, error


@pytest.mark.parametrize("base", [m.Mutant, m.OwnSoftmax])
def test_an_honest_wrapper_passes(base):
    class Honest(base):
        pass

    asked = {about for mutant, *found in MUTANTS if issubclass(mutant, base) for about in found}
    for check in conformance(Honest, "cpu", "quick", evicts=True):
        if check.broken in asked:
            check()


@pytest.mark.gpu
def test_a_sync_is_found_on_a_gpu():
    class SaysItRecords(m.Mutant):
        capabilities = m.Capabilities(graphs=True)

    checks = {c.name: c for c in conformance(SaysItRecords, "cuda")}
    with pytest.raises(ConformanceError, match=r"^host sync: backend 'SaysItRecords'"):
        checks["decode-no_sync"]()


@pytest.mark.gpu
def test_a_graph_of_the_captures_lengths_is_found_on_a_gpu():
    class Stale(load_backend("triton")):
        name = "stale"

        def bind(self, plan):
            return super().bind(replace(plan, seq_lens=plan.seq_lens.clone()))

    checks = {c.name: c for c in conformance(Stale, "cuda")}
    with pytest.raises(ConformanceError, match=r"^graphs: backend 'stale'"):
        checks["decode-graphs"]()


def test_every_property_has_a_mutant():
    checks = conformance("torch_native", "cpu", "full", validates=True, evicts=True)
    assert {check.broken for check in checks} <= {broken for _, broken, _ in MUTANTS}


def test_a_backend_that_cannot_run_says_so():
    class Elsewhere(m.Mutant):
        @staticmethod
        def reasons(config, device):
            return ["it needs a quantum computer"]

    with pytest.raises(UnsupportedError, match="quantum"):
        list(conformance(Elsewhere, "cpu"))


def test_checks_have_names_of_their_own():
    for level in ("smoke", "quick", "full"):
        names = [c.name for c in conformance("torch_native", torch.device("cpu"), level)]
        assert len(set(names)) == len(names)
