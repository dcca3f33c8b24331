"""A step's attention is filled together: each once, in one launch, to the same tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

from specattn.attention.layers import LayeredBackend
from specattn.attention.multi_step import MultiStepDraftBackend
from specattn.backends.base import (
    BoundAttention,
    CompositeAttention,
    JointFill,
    by_lengths_alone,
    fill_all,
)
from specattn.backends.by_phase import by_phase
from specattn.backends.triton import TritonBackend, TritonTree
from specattn.backends.triton_mla import TritonMlaBackend
from specattn.batch import ForwardMode
from specattn.cache.kv_pool import KVPool
from specattn.config import AttnConfig, SpecConfig
from specattn.plan import AttnInputs, AttnPlan, MultiStepDims
from tests.filling import put

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEC = SpecConfig(4, 2, 6, max_context_len=400, max_num_reqs=8)
GLOBAL, LOCAL = AttnConfig(4, 2, 64), AttnConfig(8, 2, 64, window_left=40)
LATENT = AttnConfig(16, 1, 576, v_head_dim=512, sm_scale=0.1, latent=True)
CONFIGS = {"triton": (GLOBAL, LOCAL), "by_phase": (GLOBAL,)}
LENS = [300, 7, 0, 64, 129]


def table() -> torch.Tensor:
    return torch.zeros(9, 400, dtype=torch.int32, device=DEVICE)


def layers(backend, configs=(GLOBAL, LOCAL)) -> LayeredBackend:
    return LayeredBackend(backend, configs, KVPool(configs, 4, DEVICE), DEVICE)


def rows() -> dict[str, torch.Tensor]:
    return {
        "req_pool_indices": torch.arange(1, 1 + len(LENS), device=DEVICE),
        "seq_lens": torch.tensor(LENS, dtype=torch.int32, device=DEVICE),
    }


def plan_of(mode: ForwardMode) -> AttnPlan:
    layout = SPEC.layout(mode)
    inputs = AttnInputs.alloc(len(LENS), layout, DEVICE)
    put(inputs, layout, **rows())
    return AttnPlan.over(layout, table(), inputs)


def drafts(layered: LayeredBackend, indices: str = "table"):
    bound = MultiStepDraftBackend(layered, MultiStepDims.of(SPEC), table(), 8, indices).bind(
        len(LENS)
    )
    put(bound.inputs, bound.dims, **rows())
    return bound


def leaves(bounds) -> list:
    return [
        leaf
        for bound in bounds
        for leaf in (leaves(bound.parts()) if isinstance(bound, CompositeAttention) else [bound])
    ]


def tables_of(bounds) -> list[torch.Tensor]:
    """All tables of the bounds' plans."""
    plans = [leaf.kernel.tables for leaf in leaves(bounds)]
    return [table for plan in plans for table in (plan.requests, plan.splits, plan.merges)]


def one_by_one(bounds) -> list[torch.Tensor]:
    """Fill without company, then poison; return what was filled."""
    tables, leaf = tables_of(bounds), leaves(bounds)
    for found in tables:
        found.fill_(-7)
    for bound in leaf:
        bound.fill()
    filled = [found.clone() for found in tables]
    for found in tables:
        found.fill_(-7)
    return filled


@pytest.mark.parametrize("backend", CONFIGS)
def test_all_attention_of_a_step_is_one_launch(backend, plan_launches):
    """Drafts, verification and draft extend; of layers with and without a window."""
    made = {"by_phase": by_phase(prefill="torch_native", decode="triton")}
    made = [layers(made.get(backend, backend), CONFIGS[backend]) for _ in range(2)]
    modes = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)[: 1 + (backend != "by_phase")]
    bounds = [*drafts(made[0]).steps, *(made[1].bind(plan_of(mode)) for mode in modes)]
    want = one_by_one(bounds)
    plan_launches.clear()
    fill_all(reversed([*bounds, bounds[0]]))
    assert plan_launches == [(len(leaves(bounds)),)]
    for found, filled in zip(tables_of(bounds), want, strict=True):
        assert torch.equal(found, filled)


@pytest.mark.parametrize("indices", ["table", "csr"])
def test_the_drafts_of_a_step_are_one_launch(indices, plan_launches):
    bound = drafts(layers("triton"), indices)
    bound.fill_slots()
    bound.fill()
    assert plan_launches == [(SPEC.num_draft_forwards * 2,)]
    filled = [found.clone() for found in tables_of(bound.steps)]
    want = one_by_one(bound.steps)
    for found, wanted in zip(filled, want, strict=True):
        # entries past the last are never written
        assert torch.equal(found[wanted != -7], wanted[wanted != -7])


def test_layers_of_different_backends_share_the_launch(plan_launches):
    plan = plan_of(ForwardMode.TARGET_VERIFY)
    bounds = [TritonBackend(GLOBAL, DEVICE).bind(plan), TritonMlaBackend(LATENT, DEVICE).bind(plan)]
    want = one_by_one(bounds)
    plan_launches.clear()
    fill_all(bounds)
    assert plan_launches == [(2,)]
    for found, filled in zip(tables_of(bounds), want, strict=True):
        assert torch.equal(found, filled)


@dataclass
class Alone(BoundAttention):
    """Attention that knows nothing of others."""

    log: list[str]
    name: str = "alone"

    def fill(self) -> None:
        self.log.append(self.name)

    def run(self, *_) -> None: ...


class Social(JointFill, Alone):
    """Attention that is filled with its like, subclasses included."""

    @staticmethod
    def fill_together(bounds) -> None:
        bounds[0].log.append("+".join(bound.name for bound in bounds))


class Heir(Social):
    pass


@dataclass
class Group(CompositeAttention):
    inside: list = field(default_factory=list)

    def parts(self):
        return self.inside


def test_each_is_filled_once_whatever_it_is_part_of():
    log: list[str] = []
    a, b, c = Social(log, "a"), Heir(log, "b"), Alone(log, "c")
    group = Group([b, Group([c, a])])
    fill_all([a, group, c, group])
    assert sorted(log) == ["a+b", "c"]
    log.clear()
    group.fill()
    assert sorted(log) == ["b+a", "c"]
    fill_all([])


def test_later_layers_follow_those_that_share_their_attention(monkeypatch) -> None:
    """A layer is told that another one has been there since the plan was filled."""
    told, ran = {}, []

    def for_layer(bound, scales, *, prefetch):
        found = replace(bound)
        told[id(found)] = prefetch
        return found

    monkeypatch.setattr(TritonTree, "for_layer", for_layer)
    monkeypatch.setattr(TritonTree, "run", lambda bound, *_: ran.append(bound))
    layered = layers("triton", (LOCAL, GLOBAL, GLOBAL, LOCAL, LOCAL))
    bound = layered.bind(plan_of(ForwardMode.TARGET_VERIFY))
    for begin in (bound.fill, lambda: fill_all([bound]), lambda: by_lengths_alone([bound])):
        begin()
        for layer, own in enumerate(layered.layers):
            heads = own.backend.config.num_qo_heads
            bound(layer, torch.zeros(bound.num_tokens, heads, 64, device=DEVICE))
        assert [told[id(b)] for b in ran] == [False, False, True, True, True]
        assert [b.kernel.window_left for b in ran] == [40, -1, -1, 40, 40]
        ran.clear()


@pytest.mark.parametrize("indices", ["table", "csr"])
def test_heads_are_placed_early_after_attention_that_waits(monkeypatch, indices) -> None:
    """Only where every layer's attention keeps what follows from starting before it has waited."""
    layered = layers("triton", (GLOBAL, GLOBAL))
    if indices == "csr":
        bound = drafts(layered, "csr").steps[0]
    else:
        bound = layered.bind(plan_of(ForwardMode.TARGET_VERIFY))
    seen: list[bool] = []

    def store(*args, prefetch: bool):
        seen.append(prefetch)
        return torch.zeros(bound.num_tokens, 4, 64, device=DEVICE)

    monkeypatch.setattr(type(layered.pool), "store_packed", store)
    monkeypatch.setattr(TritonTree, "run", lambda *_: None)
    for _ in range(2):
        bound.fill()
        for layer in range(2):
            bound.packed(layer, *[None] * 3)
    assert seen == [False, indices == "table"] * 2
