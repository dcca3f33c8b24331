"""Trees of topk > 1, end to end: verified, committed, decoded on.

The beams are forced to cross (every beam extends another one), to collapse (all extend beam 0) or
to tie (every token has probability 1). Each node must say what its path says alone; after a commit
the next token must be the one of plain decoding; greedy decoding must write the same text.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch

from specattn.batch import AcceptResult, Candidates
from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.step.decoder import StepDecoder
from specattn.trees import validate_tree
from tests.books import check_books
from tests.samples import half, sampled
from tests.tiny import VOCAB, DenseAttend, TinyDraft, TinyTarget, dense_greedy
from tests.worlds import BACKENDS, DEVICE

if TYPE_CHECKING:
    from specattn.speculative.step.step import Step

PROMPTS = [[3, 14, 15, 9, 26, 5], [35], list(range(1, 18))]
STYLES = ["cross", "collapse", "ties"]
SHAPES = {
    f"topk{topk}-steps{steps}-nodes{nodes}": SpecConfig(steps, topk, nodes, 64, 3)
    for topk in (2, 4)
    for steps in (2, 3, 5)
    for nodes in (4, 8, 16)
    if nodes <= 1 + topk + (steps - 1) * topk**2
}
NEXT = 7


@cache
def target() -> TinyTarget:
    return TinyTarget(device=DEVICE, window=9)


@cache
def plain_text(at: int, count: int) -> list[int]:
    return dense_greedy(target(), PROMPTS[at], count)


def candidates(style: str, config: SpecConfig, rng: random.Random) -> tuple[list, list, list]:
    """Scores, tokens and parents of one request whose beams go as ``style`` says."""
    topk, parents = config.topk, [-1]
    for step in range(config.num_draft_forwards):
        start = topk + (step - 1) * topk**2 if step else 0
        for k in range(topk):
            crossed = start + (topk - 1 - k) * (topk if step else 1)
            parents.append(start + k if style == "collapse" else crossed)
    scores: list[float] = []
    for flat in range(config.max_tree_nodes - 1):
        above = parents[flat // topk]
        chance = 1.0 if style == "ties" else rng.uniform(0.3, 0.9)
        scores.append(chance * (scores[above] if above >= 0 else 1.0))
    return scores, [rng.randrange(VOCAB) for _ in scores], parents


def dense_logits(tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor(tokens, device=DEVICE)
    positions = torch.arange(len(tokens), device=DEVICE)
    return target().forward(ids, positions, DenseAttend(target().layers)).logits


def paths_of(words: torch.Tensor) -> list[list[int]]:
    return [[node for node in range(64) if int(word) >> node & 1] for word in words[:, 0]]


def check_nodes(tree, logits, b: int, text: list[int]) -> list[list[int]]:
    """Compare every node of request ``b`` with its path over ``text``; return the paths."""
    paths = paths_of(tree.words[b])
    inner = {node for path in paths for node in path[:-1]}
    for leaf, path in enumerate(paths):
        if leaf not in inner:
            alone = dense_logits(text + tree.tokens[b, path].tolist())
            torch.testing.assert_close(logits[b, path], alone[len(text) :], rtol=1e-4, atol=1e-4)
    return paths


def phases(run: Engine, config: SpecConfig, rows: list[int], lens: list[int]) -> Step:
    """A step over the engine's pools, from given lengths, whose phases are called one by one."""
    decoder = StepDecoder(run.target, run.draft, config, run.table, run.states, buckets=run.buckets)
    on_host = torch.tensor(lens, dtype=torch.int32)
    run.states.seq_lens[list(rows)] = on_host.to(DEVICE)
    step = decoder.phases(rows, seq_lens_cpu=on_host)
    step.begin()
    return step


@sampled(half, config=SHAPES, size=[1, 3], page_size=[1, 16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_verify_commit_and_decode_on(backend, config, size, page_size):
    config = replace(config, page_size=page_size)
    run = Engine(target(), TinyDraft(device=DEVICE), config, backend=backend, buckets=[size])
    run.add([Request(prompt, 20) for prompt in PROMPTS[:size]])
    found = ((x.row, x.length, x.result.tokens[-1]) for x in run.running)
    rows, lens, bonus = zip(*found, strict=True)
    run.table.reserve(rows, [length + config.reserve_len + 1 for length in lens])
    step = phases(run, config, rows, lens)
    rng = random.Random(size + page_size)
    made = [candidates(STYLES[(b + size) % 3], config, rng) for b in range(size)]
    parts = [torch.tensor(part, device=DEVICE) for part in zip(*made, strict=True)]
    tree = step.build_tree(Candidates(*parts, torch.empty(size, 0, 0, device=DEVICE)))
    assert tree.tokens[:, 0].tolist() == list(bonus)
    validate_tree(
        tree.retrieve_next_token, tree.retrieve_next_sibling, tree.words, config.num_steps
    )
    logits, features = step.verify(tree)
    paths = []
    for b in range(size):
        every = check_nodes(tree, logits, b, PROMPTS[b])
        paths.append(rng.choice([path for path in every if len(path) == max(map(len, every))]))
    commit_and_decode(run, step, rows, lens, features, paths)
    run.clear()
    out = run.generate([Request(prompt, 12) for prompt in PROMPTS[:size]])
    assert [result.tokens for result in out] == [plain_text(b, 12) for b in range(size)]
    check_books(run.table)


def commit_and_decode(run: Engine, step: Step, rows, lens, features, paths) -> None:
    """Keep a path of every request, then decode one token after it without any draft."""
    width = run.config.num_steps + 1
    index = torch.tensor([path + [-1] * (width - len(path)) for path in paths], device=DEVICE)
    gained = [len(path) for path in paths]
    counts = torch.tensor(gained, dtype=torch.int32, device=DEVICE)
    step.commit(AcceptResult(index.int(), index, counts, index[:, 0]), features)
    run.states.bonus_tokens[list(rows)] = NEXT
    plain = replace(run.config, num_steps=0, topk=1, num_draft_tokens=1)
    after = [length + count for length, count in zip(lens, gained, strict=True)]
    follow = phases(run, plain, rows, after)
    logits, _ = follow.verify(follow.draft())
    for b, path in enumerate(paths):
        text = PROMPTS[b] + step.tree.tokens[b, path].tolist() + [NEXT]
        torch.testing.assert_close(logits[b, 0], dense_logits(text)[-1], rtol=1e-4, atol=1e-4)
