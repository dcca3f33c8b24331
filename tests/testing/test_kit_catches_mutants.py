"""One broken backend per property: the kit fails it, and says which property it breaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specattn.backends import load_backend
from specattn.backends.torch_native import TorchNativeBackend
from specattn.errors import UnsupportedError
from specattn.testing import ConformanceError, conformance
from tests.testing import mutants as m

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
    (m.SharesOnePlan, "buckets", "modes"),
    (m.SharesOnePlan, "draft steps", "growth"),
    (m.InterleavesTheHeads, "heads", "capabilities"),
    (m.LeavesTheLastRow, "written outputs", "capabilities"),
    (m.ServesSixteenRequests, "batches", "modes"),
    (m.AveragesBlindRows, "rows without keys", "modes"),
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
    (m.MisstatesItsWidth, "idle", "capabilities"),
    (m.SkipsEmptyPrefixes, "empty prefixes", "modes"),
    (m.ReadsSixtyFourColumns, "head sizes", "modes"),
    (m.ForgetsBeyondTwoThousand, "long prefixes", "modes"),
    (m.StartsListsAtZero, "index lists", "modes"),
    (m.ForgetsBeyondFiveThousand, "long prefixes", "modes"),
    (m.ForgetsInLongLists, "long prefixes", "modes"),
    (m.ScalesByThePaddedHeadSize, "head sizes", "scale"),
    (m.TakesValuesAsWideAsKeys, "head sizes", "modes"),
    (m.IgnoresWordsAfterTheSecond, "trees", "modes"),
    (m.ReadsWordsWhenFilled, "draft steps", "new trees"),
    (m.ReadsListsWhenFilled, "draft steps", "new trees"),
    (m.MasksWithMinusTenThousand, "large logits", "rows without keys"),
    (m.SubtractsNoMaximum, "large logits", "modes"),
    (m.LooksIntoTheFuture, "window", "modes"),
    (m.ReadsEverythingListed, "permuted slots", "trees"),
    (TorchNativeBackend, "bad input", "modes"),
]


def failures(mutant: type, about: str) -> list[ConformanceError]:
    """Run the checks of one property; of the whole kit where any check may find it."""
    anywhere = about in ("unused memory", "written outputs", "lse")
    found = []
    for check in conformance(mutant, "cpu", validates=about == "bad input", evicts=True):
        if check.broken == about or (anywhere and check.broken in ("modes", "sinks")):
            try:
                check()
            except ConformanceError as error:
                found.append(error)
            except UnsupportedError:
                continue
    return found


@pytest.mark.parametrize(
    ("mutant", "broken", "kept"), MUTANTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_the_kit_names_what_a_mutant_breaks(mutant, broken, kept):
    found = [error for error in failures(mutant, broken) if error.broken == broken]
    # a mode that is refused though it is declared is found where it runs
    if not found and broken == "capabilities":
        found = [error for error in failures(mutant, "modes") if error.broken == broken]
    assert found, f"{mutant.__name__} passes"
    for error in found:
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

    for check in conformance(Honest, "cpu", "quick", evicts=True):
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
