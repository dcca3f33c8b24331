"""R41: sglang#16974.

Under data parallelism the counter of padded tokens was not that of the batch: 35 % less acceptance.

There is no such counter: what a step reads is its bucket, and padding is row 0. A rank with fewer
requests than the others, or none, runs the same forwards at the same widths by filling up with row
0; that changes no state, no text and no KV but the padding page's, on any rank.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from tests.recordings import forget
from tests.tiny import TinyDraft, TinyTarget, dense_greedy
from tests.worlds import BACKENDS, DEVICE

PROMPTS = [[3, 14, 15, 9, 26, 5], [35, 2], [8, 9, 7, 9]]
TREES = {"plain": (0, 1, 1), "chain": (3, 1, 4), "tree": (3, 4, 9)}


class Group:
    """Two ranks, one thread each: what one says, both hear, once both have said something."""

    def __init__(self) -> None:
        self._meet = threading.Barrier(2, timeout=600)
        self._said = [0, 0]

    def all_gather(self, rank: int, value: int) -> list[int]:
        self._said[rank] = value
        self._meet.wait()
        heard = list(self._said)
        self._meet.wait()
        return heard


class RankTarget(TinyTarget):
    """Asks for the other rank's number of tokens in every forward, and gets its own."""

    group: Group | None = None
    rank = 0

    def forward(self, input_ids, positions, attend, rows=None):
        if self.group is not None:
            heard = self.group.all_gather(self.rank, len(input_ids))
            assert heard == [len(input_ids)] * 2, "the ranks run other forwards"
        return super().forward(input_ids, positions, attend, rows)


def engine(tree, backend="torch_native", target=TinyTarget, **options) -> Engine:
    config = SpecConfig(*tree, 96, 4, 4)
    models = target(device=DEVICE), TinyDraft(device=DEVICE)
    return Engine(*models, config, backend=backend, buckets=[2, 4], **options)


def admitted(run: Engine, prompts=PROMPTS) -> tuple[list[int], list[list[int]]]:
    """Run prompts, with slots for whole contexts; returns their rows and first tokens."""
    results = run.add([Request(prompt, 60) for prompt in prompts])
    rows = [live.row for live in run.running]
    run.table.reserve(rows, [run.config.max_context_len] * len(rows))
    return rows, [list(result.tokens) for result in results]


def snapshot(run: Engine) -> dict[str, torch.Tensor]:
    """Everything that outlives a step, but for the page of padding."""
    found = {name: value.clone() for name, value in run.states.tensors().items()}
    for model, slot in (("target", run.target), ("draft", run.draft)):
        if slot is not None:
            for name, data in (("k", slot.pool.k), ("v", slot.pool.v)):
                found[f"{model}.{name}"] = data[:, run.config.page_size :].clone()
    return found | {"reserved": run.table.reserved.clone()}


@pytest.mark.parametrize("cudagraph", ["full", "piecewise"])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_idle_step_touches_padding_alone(backend, tree, cudagraph):
    run, alone = (engine(tree, backend, cudagraph=cudagraph) for _ in range(2))
    rows, _ = admitted(run)
    admitted(alone)
    decoder, forwards = run.decoder(run.config), run.target.model.calls
    for idle in ([], [0], [0, 0, 0]):
        before = snapshot(run)
        forwards.clear()
        assert decoder.step(idle) == [[]] * len(idle)
        for name, value in snapshot(run).items():
            assert torch.equal(value, before[name]), name
        bucket = 4 if len(idle) > 2 else 2
        recorded = any(decoder.runner.recorded(part) for part in decoder.modes)
        ran = [] if recorded else [bucket * run.config.num_draft_tokens]
        assert forwards == ran, "an idle rank runs the forwards of a bucket"
        # idle steps before and between show in nothing
        assert decoder.step(rows) == alone.decoder(alone.config).step(rows)
    assert not decoder.runner.stats.eager


def test_an_idle_step_is_no_exception():
    """Drawn steps, lengths on the host, the checks of debugging, and no bucket at all."""
    run = engine((3, 4, 9), cudagraph="piecewise", validate="debug")
    rows, _ = admitted(run)
    decoder = run.decoder(run.config)
    assert decoder.step([], seq_lens_cpu=torch.zeros(0, dtype=torch.int32)) == []
    decoder.capture(sampled=True)
    assert decoder.step([], sampled=True) == []
    gained = decoder.step([rows[0], 0])
    assert gained[0]
    assert gained[1] == []
    forget(decoder.runner, *decoder.modes)
    assert decoder.step([]) == []
    assert sum(decoder.runner.stats.eager.values()) == 3


@pytest.mark.parametrize("tree", [(3, 1, 4), (3, 4, 9)], ids=["chain", "tree"])
def test_ranks_that_wait_for_each_other(tree):
    """Rank 1 has less to do, then nothing; rank 0 decodes as it does alone."""
    group, steps = Group(), 5
    runs = [engine(tree, target=RankTarget, graphs=False) for _ in range(2)]
    work = [admitted(runs[0]), admitted(runs[1], PROMPTS[:1])]
    # rank 1 has a request for two steps, then none
    plans = [[work[0][0]] * steps, [[*work[1][0], 0, 0]] * 2 + [[0, 0, 0]] * (steps - 2)]
    for rank, run in enumerate(runs):
        run.target.model.group, run.target.model.rank = group, rank

    def decode(rank: int) -> list[list[list[int]]]:
        decoder = runs[rank].decoder(runs[rank].config)
        return [decoder.step(rows) for rows in plans[rank]]

    with ThreadPoolExecutor(2) as pool:
        gained = list(pool.map(decode, range(2)))
    target = TinyTarget(device=DEVICE)
    for rank, (_, texts) in enumerate(work):
        for at, text in enumerate(texts):
            for step in gained[rank]:
                text += step[at]
            assert text == dense_greedy(target, PROMPTS[at], len(text))
    assert all(not any(step) for step in gained[1][2:])
    lens = [[len(tokens) for tokens in step] for step in gained[0]]
    alone = engine(tree)
    rows, _ = admitted(alone)
    decoder = alone.decoder(alone.config)
    assert lens == [[len(tokens) for tokens in decoder.step(rows)] for _ in range(steps)]
