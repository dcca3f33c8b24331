"""What layers with states keep: where it lies, what a step leaves for it, and the kit's rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specattn.batch import AcceptResult
from specattn.cache.hybrid_pool import HybridPool
from specattn.cache.kv_pool import KVPool
from specattn.cache.memory import memory_for
from specattn.cache.slot_table import SlotTable
from specattn.cache.state_pool import StatePool
from specattn.config import FLOAT8, AttnConfig, StateConfig
from specattn.errors import UnsupportedError
from specattn.kernels.gated_delta import LayerParts
from specattn.speculative.model import ModelSlot
from specattn.testing import ConformanceError, memory_conformance
from specattn.testing.memories import CONFIGS
from tests.kernels.gated_delta.oracle import (
    Shape,
    apart,
    deepest,
    exact_mixed,
    exact_path,
    parts_for,
    paths_of,
    tree,
    weights_for,
    words_of_trees,
)
from tests.memories import Reading
from tests.tiny import TinyTarget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTENDS, MIXES = AttnConfig(4, 2, 16), StateConfig(2, 6, 16, 32)
LAYERS = [MIXES, MIXES, ATTENDS, MIXES]
#: The shape of a 27B model: 48 layers of these, one head in 128 numbers.
LARGE = StateConfig(16, 48, 128, 128, dtype=torch.bfloat16)


def pool_of(layers=LAYERS, rows=4, slots=8, **options):
    return HybridPool(layers, slots, DEVICE, rows=rows, **options)


def accepted(index):
    batch, depth = index.shape
    none = torch.zeros(batch, depth, dtype=torch.int64, device=DEVICE)
    return AcceptResult(index, none, (index >= 0).sum(1).int(), none[:, 0])


def test_each_layer_has_a_place_among_those_of_its_kind():
    pool = pool_of(kv_dtype=FLOAT8)
    assert pool.places == (0, 1, 0, 2)
    assert pool.layers == (MIXES, MIXES, replace(ATTENDS, kv_dtype=FLOAT8), MIXES)
    assert pool.kv.layers == (pool.layers[2],)
    assert pool.num_slots == 8
    assert pool.states.states.shape == (3, 4, 6, 32, 16)
    assert pool.states.windows.shape == (3, 4, MIXES.conv_channels, 3)
    assert {*pool.tensors()} == {"k_cache", "v_cache", "states", "windows"}
    assert {*pool.by_row()} == {"states", "windows"}
    assert not any(tensor.any() for tensor in pool.by_row().values())


def test_what_graphs_bake_in_is_read_only_and_compared():
    pool, other = pool_of(), pool_of()
    for name in ("states", "windows"):
        with pytest.raises(AttributeError, match=f"StatePool.{name} is read-only"):
            setattr(pool.states, name, getattr(other.states, name))
    with pytest.raises(AttributeError, match=r"HybridPool.states is read-only"):
        pool.states = other.states
    assert pool.fingerprint() == pool.fingerprint()
    named = {name for name, _ in pool.fingerprint()}
    assert named >= {"k_cache", "v_cache", "states", "windows"}
    assert dict(pool.fingerprint())["states"] != dict(other.fingerprint())["states"]


def test_a_table_gives_its_rows():
    table = SlotTable(
        max_num_reqs=5, max_context_len=16, page_size=1, num_slots=40, device=torch.device(DEVICE)
    )
    pool = memory_for(LAYERS, table)
    assert isinstance(pool, HybridPool)
    assert pool.states.states.shape[1] == len(table.req_to_token)
    assert pool.num_slots == table.num_pages
    assert isinstance(memory_for([ATTENDS], table), KVPool)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([MIXES], "layers must be at least one"),
        ([ATTENDS, MIXES, replace(MIXES, num_v_heads=4)], "layers of one pool must be .* alike"),
        ([ATTENDS, "mixes"], "every layer must be a StateConfig"),
    ],
)
def test_layers_that_are_no_pools(layers, message):
    with pytest.raises(ValueError, match=message):
        pool_of(layers)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_v_heads": 3}, "num_v_heads must be a multiple of num_k_heads, got 3 and 2"),
        ({"num_k_heads": 0}, "num_k_heads must be at least 1, got 0"),
        ({"head_k_dim": 48}, "head_k_dim must be a power of two, got 48"),
        ({"head_v_dim": 8}, r"head_v_dim must be 16\.\.256, got 8"),
        ({"conv_width": 1}, r"conv_width must be 2\.\.8, got 1"),
        ({"dtype": torch.float64}, "dtype must be float32, float16 or bfloat16"),
        ({"state_dtype": torch.float16}, "state_dtype must be float32 or bfloat16"),
        ({"kv_dtype": FLOAT8}, "kv_dtype must be None in layers with states"),
        ({"deterministic": True}, "deterministic must be False in layers with states"),
    ],
)
def test_configs_refuse_what_is_not_served(given, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        replace(MIXES, **given)


def test_a_step_leaves_less_than_30_mib_per_request_of_16_nodes():
    """A state per node of the same layers would be 2.3 GiB."""
    pool = StatePool([LARGE] * 48, 2, "meta")
    assert pool.nodes(1, 16).size < 30 * 2**20
    assert pool.states[0, 0].numel() * 48 * 16 * 4 > 2.2 * 2**30


def test_trees_of_more_nodes_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="trees have at most 64 nodes, got 65"):
        pool_of().nodes(1, 65)


def test_nothing_is_committed_without_nodes():
    pool = pool_of()
    tail = torch.tensor([[3, 4]], dtype=torch.int32, device=DEVICE)
    pool.kv.k[:, 4] = 1
    rows, index = torch.tensor([1], device=DEVICE), paths_of([[0, 1]], 2)
    with pytest.raises(ValueError, match="nodes must be those of verification"):
        pool.commit(tail, accepted(index), rows)
    assert not pool.kv.k[:, 3].any()


def test_trees_and_prompts_leave_the_same():
    """A step's path, committed, and the same tokens as a prompt; of two layers and requests."""
    shape, n = Shape((2, 6), (16, 32)), 6
    trees = [tree("any", n, 1), tree("deep", n, 2)]
    paths, pool = [deepest(one) for one in trees], pool_of(slots=2 * n + 1, rows=6)
    parts = [parts_for(shape, 2 * n, seed=layer) for layer in range(3)]
    weights, rows = weights_for(shape), torch.tensor([4, 2], device=DEVICE)
    nodes = pool.nodes(4, n).bind(2)
    for name, tensor in pool.by_row().items():
        tensor.normal_(generator=torch.Generator(DEVICE).manual_seed(len(name)))
        # as both kinds of forward begin with the same text
        tensor[:, [1, 3]] = tensor[:, [4, 2]]
    before = {name: tensor.clone() for name, tensor in pool.by_row().items()}
    found = [
        pool.states.verify(layer, one, weights, rows=rows, words=words_of_trees(trees), nodes=nodes)
        for layer, one in enumerate(parts)
    ]
    tail = torch.arange(1, 2 * n + 1, dtype=torch.int32, device=DEVICE).view(2, n)
    pool.kv.k[:] = torch.arange(2 * n + 1, device=DEVICE)[None, :, None, None]
    pool.commit(tail, accepted(paths_of(paths, n)), rows, nodes)
    for slots, path in zip(tail, paths, strict=True):
        assert torch.equal(pool.kv.k[0, slots[: len(path)].long(), 0, 0].int(), slots[path])
    where = [which * n + node for which, path in enumerate(paths) for node in path]
    ends = torch.tensor([0, len(paths[0]), len(where)], dtype=torch.int32, device=DEVICE)
    for layer, one in enumerate(parts):
        own = LayerParts(*(part[:, where] for part in vars(one).values()))
        prompts = {"rows": torch.tensor([1, 3], device=DEVICE), "qo_indptr": ends}
        read = pool.states.read(layer, own, weights, **prompts)
        assert apart(read, found[layer][where]) < 1e-5
        first = LayerParts(*(part[:, : ends[1]] for part in vars(own).values()))
        tokens, window = exact_mixed(shape, first, weights, before["windows"][layer, 4])
        want, state = exact_path(tokens, before["states"][layer, 4])
        assert apart(read[: ends[1]], want) < 1e-5
        assert apart(pool.states.states[layer, 4], state) < 1e-5
        assert apart(pool.states.windows[layer, 4], window) < 1e-6
    for tensor in pool.by_row().values():
        assert apart(tensor[:, [1, 3]], tensor[:, [4, 2]]) < 1e-5


def external(places, count):
    """A pool over an engine's states, drawn, NaN where no row's are."""
    one, gen = MIXES, torch.Generator().manual_seed(5)
    states = torch.randn(3, count, one.num_v_heads, 32, 16, generator=gen)
    windows = torch.randn(3, count, one.conv_channels, 3, generator=gen)
    for tensor in (states, windows):
        tensor[:, [at for at in range(count) if at not in places.tolist()]] = torch.nan
    made = (states.to(DEVICE), windows.to(DEVICE), places.to(DEVICE))
    return StatePool.from_external([MIXES] * 3, *made)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_an_engines_states_lie_where_it_says(kind):
    """Trees, commits and prompts do what they do to states by row; and the engine moves one."""
    shape, n = Shape((2, 6), (16, 32)), 5
    trees = [tree("any", n, 1), tree("deep", n, 2), tree("deep", n, 3)]
    theirs, own = (
        external(torch.tensor([0, 6, 1, 4], dtype=kind), 8),
        StatePool([MIXES] * 3, 4, DEVICE),
    )
    places, weights = theirs.places.long(), weights_for(shape)
    for mine, other in zip(own.tensors().values(), theirs.tensors().values(), strict=True):
        mine.copy_(other[:, places])
    words, index = words_of_trees(trees), paths_of([deepest(one) for one in trees], n)
    nodes = [pool.nodes(4, n).bind(3) for pool in (own, theirs)]
    # the second is padding
    rows = torch.tensor([3, 0, 1], device=DEVICE)
    for _ in range(2):
        for pool, left in zip((own, theirs), nodes, strict=True):
            given = {"rows": rows, "words": words, "nodes": left}
            outs = [
                pool.verify(layer, parts_for(shape, 3 * n, seed=layer), weights, **given)
                for layer in range(3)
            ]
            # what the engine says meanwhile is of the next step
            if pool is theirs:
                now = places.clone()
                theirs.places[3] = 7
            pool.commit(left, index, rows)
            left_there = {name: one.clone() for name, one in pool.tensors().items()}
            if pool is own:
                wanted = outs, left_there
        for found, want in zip(outs, wanted[0], strict=True):
            assert torch.equal(found, want)
        for found, want in zip(left_there.values(), wanted[1].values(), strict=True):
            assert torch.equal(found[:, now], want)
        for tensor in theirs.tensors().values():
            tensor[:, 7] = tensor[:, now[3]]
        places = theirs.places.long()
    ends = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
    prompt = {"rows": torch.tensor([1, 3], device=DEVICE), "qo_indptr": ends}
    found, want = (
        pool.read(1, parts_for(shape, 9, seed=7), weights, **prompt) for pool in (theirs, own)
    )
    assert torch.equal(found, want)
    assert torch.equal(theirs.states[1, places], own.states[1])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"states": lambda x: x.mT.contiguous()}, "states must be"),
        ({"windows": lambda x: x.half()}, "windows must be"),
        ({"windows": lambda x: x[:, 1:]}, "windows must be"),
        ({"places": lambda x: x.short()}, "places must be int32 or int64, got torch.int16"),
        ({"places": lambda x: x[::2]}, "places must be contiguous"),
    ],
)
def test_states_of_an_engine_that_are_none(changed, message):
    pool = external(torch.tensor([0, 6, 1, 4]), 8)
    given = pool.tensors() | {"places": pool.places}
    given |= {name: change(given[name]) for name, change in changed.items()}
    with pytest.raises(ValueError, match=message):
        StatePool.from_external(pool.layers, **given)


class Mixed(KVPool):
    """Keys and values, and states over texts' keys: what a hybrid's layers would bring."""

    def __init__(self, layers, num_slots, device, *, rows, **options) -> None:
        super().__init__(layers, num_slots, device, **options)
        shape = Shape((1, 2), (16, 16))
        config = StateConfig(1, 2, 16, 16)
        self.mixing = StatePool([config] * len(layers), rows, device)
        self.weights, self.count = weights_for(shape), config.conv_channels
        gen = torch.Generator().manual_seed(2)
        drawn = torch.randn(self.k[0, 0].numel(), self.count + 4, generator=gen)
        self.project = drawn.to(self.device)

    @classmethod
    def over(cls, layers, table):
        slots, rows = table.num_pages * table.page_size, len(table.req_to_token)
        return cls(layers, slots, table.req_to_token.device, rows=rows)

    def tensors(self):
        return super().tensors() | self.mixing.tensors()

    def by_row(self):
        return self.mixing.tensors()

    def parts(self, keys):
        """What a layer's products would give for tokens of these keys."""
        made = (keys.reshape(-1, len(self.project)).float() @ self.project)[None]
        return LayerParts(*made.split([self.count, 2, 2], 2))

    def read(self, layer, plan, k) -> None:
        rows = {"rows": plan.req_pool_indices, "qo_indptr": plan.qo_indptr}
        self.mixing.read(layer, self.parts(k), self.weights, **rows)

    def commit(self, tail_slots, accepted, rows=None, nodes=None) -> None:
        (batch, n), keys = tail_slots.shape, self.k[:, tail_slots.long()]
        nodes = self.mixing.nodes(batch, n)
        for layer in range(len(keys)):
            # what is committed needs no ancestors of its own, but for the convolution
            words = self.words(accepted, n)
            given = {"rows": rows, "words": words, "nodes": nodes}
            self.mixing.verify(layer, self.parts(keys[layer]), self.weights, **given)
        self.fold(nodes, accepted.accept_index, rows)
        super().commit(tail_slots, accepted)

    def fold(self, nodes, accept_index, rows) -> None:
        self.mixing.commit(nodes, accept_index.contiguous(), rows)

    def words(self, accepted, n):
        """Ancestors of accepted nodes; others see themselves."""
        words = (1 << torch.arange(n, device=self.device)).repeat(len(accepted.accept_index), 1)
        for request, path in enumerate(accepted.accept_index.tolist()):
            seen = 0
            for node in (one for one in path if one >= 0):
                seen |= 1 << node
                words[request, node] = seen
        return words[..., None].contiguous()


class FoldsOneNode(Mixed):
    def fold(self, nodes, accept_index, rows) -> None:
        super().fold(nodes, accept_index[:, :1], rows)


class FoldsIntoPlaces(Mixed):
    def fold(self, nodes, accept_index, rows) -> None:
        places = torch.arange(1, len(rows) + 1, device=rows.device)
        super().fold(nodes, accept_index, torch.where(rows > 0, places, 0))


def mixed_slot(memory):
    def make(model, table):
        pool = memory.over(model.layers, table)
        return ModelSlot(model, pool, Reading("torch_native", pool.layers, pool, pool.device))

    return make


TARGET = TinyTarget(window=6, device=DEVICE)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda one: f"{one.num_steps}x{one.topk}")
def test_states_hold_what_plain_decoding_leaves(config):
    for check in memory_conformance(TARGET, mixed_slot(Mixed), configs=[config]):
        check()


@pytest.mark.parametrize("mutant", [FoldsOneNode, FoldsIntoPlaces])
def test_the_kit_finds_mutants(mutant):
    broken = set()
    for check in memory_conformance(TARGET, mixed_slot(mutant), configs=CONFIGS[1:2]):
        try:
            check()
        except ConformanceError as error:
            broken.add(error.broken)
    assert "kept paths" in broken
