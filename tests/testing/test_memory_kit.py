"""The memories' part of the kit: both kinds pass, and each mutant breaks its rule."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from specattn.cache.kv_pool import KVPool
from specattn.speculative.model import ModelSlot
from specattn.testing import ConformanceError, memory_conformance
from specattn.testing.memories import CONFIGS
from tests.memories import Sums, slot_of
from tests.samples import half, on_cpu
from tests.tiny import TinyTarget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TARGET = TinyTarget(window=6, device=DEVICE)
SLOTS = {"keys and values": None, "a memory by row": slot_of}


@on_cpu(half, "slot", "config")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda one: f"{one.num_steps}x{one.topk}")
@pytest.mark.parametrize("slot", SLOTS.values(), ids=SLOTS)
def test_what_a_memory_holds_is_what_plain_decoding_leaves(slot, config) -> None:
    for check in memory_conformance(TARGET, slot, configs=[config]):
        check()


def test_checks_have_names_of_their_own() -> None:
    names = [check.name for check in memory_conformance(TARGET)]
    assert len(set(names)) == len(names) == 3 * len(CONFIGS)


class Pool(KVPool):
    """Honest until a subclass gets a commit wrong."""

    def commit(self, tail_slots, accepted, rows=None, nodes=None) -> None:
        super().commit(tail_slots, self.kept(accepted), rows)

    def kept(self, accepted):
        return accepted

    @classmethod
    def over(cls, layers, table):
        return cls(layers, table.num_pages * table.page_size, table.req_to_token.device)


def changed(accepted, index):
    return type(accepted)(
        index, accepted.accept_tokens, accepted.accept_lens, accepted.bonus_tokens
    )


class MovesNothing(Pool):
    def commit(self, tail_slots, accepted, rows=None, nodes=None) -> None:
        pass


class LeavesTheLastNode(Pool):
    def kept(self, accepted):
        index = accepted.accept_index.clone()
        index.scatter_(1, (accepted.accept_lens[:, None] - 1).long(), -1)
        return changed(accepted, index)


class MovesTheFirstOnesPath(Pool):
    def kept(self, accepted):
        index = accepted.accept_index
        return changed(accepted, index[:1].expand_as(index).contiguous())


class ForgetsALayer(Pool):
    def commit(self, tail_slots, accepted, rows=None, nodes=None) -> None:
        last = self.k[-1].clone()
        super().commit(tail_slots, accepted, rows)
        self.k[-1] = last


class TakesAllNodes(Sums):
    """As if every path were as long as a tree is deep."""

    def path(self, accepted):
        index = accepted.accept_index
        return torch.where(index < 0, 0, index)


class SitsPlainDecodingOut(Sums):
    def commit(self, tail_slots, accepted, rows=None, nodes=None) -> None:
        if tail_slots.shape[1] > 1:
            super().commit(tail_slots, accepted, rows)


class BeginsEveryPieceAnew(Sums):
    def read(self, layer, plan, k) -> None:
        self.sums[layer, plan.req_pool_indices] = 0
        super().read(layer, plan, k)


class GoesOnAtPlaces(Sums):
    """A request's row is its place in the step."""

    def commit(self, tail_slots, accepted, rows=None, nodes=None) -> None:
        places = torch.arange(1, len(rows) + 1, device=rows.device)
        super().commit(tail_slots, accepted, torch.where(rows > 0, places, 0))


class BeginsNothingAnew(ModelSlot):
    def admit(self, rows) -> None:
        pass


PIECES, PLAIN, PATHS = "prompts in pieces", "plain decoding", "kept paths"
# mutant, and the rules that it breaks
MUTANTS = [
    (Pool, set()),
    (MovesNothing, {PATHS}),
    (LeavesTheLastNode, {PATHS}),
    (MovesTheFirstOnesPath, {PATHS}),
    (ForgetsALayer, {PATHS}),
    (Sums, set()),
    (TakesAllNodes, {PATHS}),
    (SitsPlainDecodingOut, {PLAIN, PATHS}),
    (BeginsEveryPieceAnew, {PIECES}),
    (BeginsNothingAnew, {PIECES, PLAIN, PATHS}),
    (GoesOnAtPlaces, {PLAIN, PATHS}),
]


def slot_with(mutant: type):
    if issubclass(mutant, ModelSlot):
        return partial(slot_of, kind=mutant)
    if issubclass(mutant, Sums):
        return partial(slot_of, memory=mutant)
    return lambda model, table: ModelSlot.of(model, mutant.over(model.layers, table), "auto")


@pytest.mark.parametrize(("mutant", "rules"), MUTANTS)
def test_a_mutant_breaks_its_rules_and_no_other(mutant, rules) -> None:
    found = {}
    for check in memory_conformance(TARGET, slot_with(mutant), configs=CONFIGS[1:2]):
        try:
            check()
        except ConformanceError as error:
            found[error.broken] = str(error), check.name
    assert found.keys() == rules
    for rule, (message, name) in found.items():
        assert message.startswith(f"{rule}: memory of 'TinyTarget' in {name}: ")
        assert message.endswith(", differs")
