"""Thousands of replays with changing lengths and trees give the bits of a fresh run."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from specattn.batch import Candidates
from specattn.kernels.attention import TreeAttention
from specattn.kernels.attention.tiles import tile_config
from specattn.kernels.tree import accept_greedy, build_tree
from tests.kernels.tree_oracle import poisoned_path, poisoned_tree

SETS = 32
HEADS, KV_HEADS, DIM = 8, 2, 128
WIDTH, SLOTS = 2600, 40_000
# batch, topk, steps, nodes
BUCKETS = [(4, 4, 3, 8), (16, 4, 3, 8), (4, 4, 5, 16)]


class Bucket:
    """A step of fixed shapes: build the tree, plan, attend in two layers, accept.

    Its inputs are row ``pick`` of ``sets`` stacked input sets, copied within the step; so a replay
    needs one number from the host.
    """

    def __init__(self, shape, pools, sets, triton):
        self.batch, self.topk, self.steps, self.nodes = shape
        self.pools, self.sets = pools, sets
        self.inputs = {name: torch.empty_like(stack[0]) for name, stack in sets.items()}
        batch, nodes, rows = self.batch, self.nodes, self.batch * self.nodes
        self.tree = poisoned_tree(batch, nodes)
        self.accepted = poisoned_path(batch, self.steps)
        self.outs = [torch.empty(rows, HEADS, DIM, **BF16) for _ in pools]
        self.lses = [torch.empty(rows, HEADS, device="cuda") for _ in pools]
        group = HEADS // KV_HEADS
        tile = tile_config(nodes * group, DIM, DIM, torch.bfloat16, batch) if triton else None
        self.kernel = TreeAttention(
            batch=batch,
            q_len=nodes,
            tail_len=nodes,
            num_qo_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            v_head_dim=DIM,
            dtype=torch.bfloat16,
            device="cuda",
            sm_scale=DIM**-0.5,
            tile=tile,
        )
        self.pick = torch.zeros(1, dtype=torch.int64, device="cuda")

    def step(self):
        for name, stack in self.sets.items():
            torch.index_select(stack, 0, self.pick, out=self.inputs[name][None])
        i, t = self.inputs, self.tree
        candidates = Candidates(i["scores"], i["tokens"], i["parents"], t.draft_probs)
        build_tree(candidates, i["bonus"], i["lens"], topk=self.topk, out=t)
        self.kernel.plan(i["lens"], i["rows"], WIDTH).fill()
        for pool, out, lse in zip(self.pools, self.outs, self.lses, strict=True):
            self.kernel.run(
                i["q"],
                pool[0],
                pool[1],
                out,
                lse,
                indices=i["table"],
                positions=t.positions,
                tail_slots=i["tails"],
                tail_positions=t.positions,
                tail_words=t.words,
            )
        accept_greedy(t, i["argmax"], out=self.accepted)

    def results(self):
        t, path = self.tree, self.accepted
        tensors = [t.tokens, t.positions, t.words, t.retrieve_next_token, t.retrieve_next_sibling]
        tensors += [path.accept_index, path.accept_tokens, path.accept_lens, path.bonus_tokens]
        tensors += [*self.outs, *self.lses]
        return [tensor.view(torch.int16) for tensor in tensors]


BF16 = {"dtype": torch.bfloat16, "device": "cuda"}


def input_sets(shape, seed):
    """Lengths from 0 to 2,500, with padded requests at the end; slots in a new order each time."""
    batch, topk, steps, nodes = shape
    rng = random.Random(seed)
    count, groups = topk + (steps - 1) * topk**2, 1 + (steps - 1) * topk
    sets = []
    for _ in range(SETS):
        live = rng.randrange(1, batch + 1)
        budget = (SLOTS - batch * nodes) // live
        lens = [rng.randrange(min(2500, budget)) if b < live else 0 for b in range(batch)]
        order = torch.randperm(SLOTS - 1, dtype=torch.int32) + 1
        table = torch.zeros(batch + 1, WIDTH, dtype=torch.int32)
        tails = torch.zeros(batch, nodes, dtype=torch.int32)
        at = 0
        for b, n in enumerate(lens[:live]):
            table[b + 1, :n] = order[at : at + n]
            tails[b] = order[at + n : at + n + nodes]
            at += n + nodes
        parents = [[-1, *rng.sample(range(topk), topk)] for _ in range(batch)]
        for row in parents:
            for step in range(1, steps - 1):
                first = topk + (step - 1) * topk**2
                row += rng.sample(range(first, first + topk**2), topk)
        sets.append(
            {
                "scores": torch.rand(batch, count),
                "tokens": torch.randint(9, (batch, count)),
                "parents": torch.tensor(parents),
                "bonus": torch.randint(9, (batch,)),
                "lens": torch.tensor(lens, dtype=torch.int32),
                "rows": torch.tensor([b + 1 if b < live else 0 for b in range(batch)]),
                "table": table,
                "tails": tails,
                "argmax": torch.randint(9, (batch, nodes)),
                "q": torch.randn(batch * nodes, HEADS, DIM).bfloat16(),
            }
        )
        assert len(parents[0]) == groups
    return {name: torch.stack([s[name] for s in sets]).cuda() for name in sets[0]}


@pytest.mark.gpu
@pytest.mark.parametrize(("replays", "triton"), [(10_000, False), (1_000, True)])
def test_replays_equal_fresh_runs(replays, triton):
    pools = [torch.randn(2, SLOTS, KV_HEADS, DIM, **BF16) for _ in range(2)]
    memory, graphs = None, []
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number, shape in enumerate(BUCKETS):
        sets = input_sets(shape, number)
        fresh = []
        for pick in range(SETS):
            bucket = Bucket(shape, pools, sets, triton)
            bucket.pick.fill_(pick)
            bucket.step()
            fresh.append([result.clone() for result in bucket.results()])
        expected = [torch.stack(results) for results in zip(*fresh, strict=True)]
        live = Bucket(shape, pools, sets, triton)
        for result in live.results():
            result.fill_(-1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=memory):
                live.step()
                for result, stack in zip(live.results(), expected, strict=True):
                    wrong += (result != stack.index_select(0, live.pick)[0]).sum()
                    # what a replay does not write again is not equal by chance
                    result.fill_(-1)
        finally:
            gc.enable()
        memory = graph.pool()
        # the graph reads what is expected: it has to stay
        graphs.append((graph, live, expected))
    rng = random.Random(0)
    for _ in range(replays):
        graph, live, _ = rng.choice(graphs)
        live.pick.fill_(rng.randrange(SETS))
        graph.replay()
    assert wrong.item() == 0, f"{wrong.item()} of the 16-bit halves differ"


@pytest.mark.gpu
def test_the_comparison_sees_a_difference():
    """One wrong bit in what is expected is found in every replay of its set."""
    pools = [torch.randn(2, SLOTS, KV_HEADS, DIM, **BF16)]
    bucket = Bucket(BUCKETS[0], pools, input_sets(BUCKETS[0], 7), False)
    bucket.pick.fill_(3)
    bucket.step()
    first = [result.clone() for result in bucket.results()]
    bucket.pick.fill_(4)
    bucket.step()
    assert any(not torch.equal(*pair) for pair in zip(first, bucket.results(), strict=True))
    bucket.pick.fill_(3)
    bucket.step()
    assert all(torch.equal(*pair) for pair in zip(first, bucket.results(), strict=True))
