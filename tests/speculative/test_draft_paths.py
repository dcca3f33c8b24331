"""R50 (sglang#7523, #8409): drafting a tree node is drafting its path as a chain."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.speculative.step.level import Level
from tests.samples import half, sampled, star
from tests.tiny import DenseAttend, TinyDraft, TinyTarget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[3, 14, 15, 9, 26, 5], [35, 2], list(range(1, 40))]


@dataclass
class Call:
    tokens: list[int]
    positions: list[int]
    hidden_in: torch.Tensor
    hidden: torch.Tensor
    logits: torch.Tensor


@dataclass
class Spy:
    """A draft model that remembers its forwards."""

    draft: TinyDraft
    calls: list[Call] = field(default_factory=list)

    def __getattr__(self, name):
        return getattr(self.draft, name)

    def forward(self, input_ids, hidden_states, positions, attend, rows=None, *, sources=None):
        if sources is not None:
            hidden_states = hidden_states[sources]
        out = self.draft.forward(input_ids, hidden_states, positions, attend, rows)
        self.calls.append(
            Call(
                input_ids.tolist(),
                positions.tolist(),
                hidden_states.clone(),
                out.hidden_states.clone(),
                out.logits.clone(),
            )
        )
        return out


def path_of(words: torch.Tensor) -> list[int]:
    """Nodes whose bits are set, ascending."""
    return [64 * w + b for w, word in enumerate(words.tolist()) for b in range(64) if word >> b & 1]


@sampled(half, tree=[(2, 3), (4, 4), (3, 6), (8, 10)], page_size=[1, 16], indices=["table", "csr"])
def test_every_node_is_drafted_as_its_path_would_be_alone(tree, page_size, indices):
    topk, steps = tree
    target, spy = TinyTarget(device=DEVICE), Spy(TinyDraft(device=DEVICE, noise=3.0, sharp=0.5))
    config = SpecConfig(steps, topk, 4, 128, 3, page_size)
    run = Engine(target, spy, config, graphs=False, indices=indices)
    run.add([Request(p, 60) for p in PROMPTS])
    run.step()
    spy.calls.clear()
    texts = [list(live.tokens) for live in run.running]
    run.step()
    decoder = run.decoder(config)
    (part,) = decoder.parts[Level.GREEDY]
    (step,) = decoder.runner._captured[part][3].program.steps
    words = step.bound.multi_step.inputs.words  # [3, steps - 1, topk, W]
    calls = spy.calls[: steps - 1]
    crossed = collapsed = 0
    for b, text in enumerate(texts):
        features = dense_features(target, text[:-1])
        for step in range(steps - 1):
            paths = [path_of(words[b, step, k]) for k in range(topk)]
            assert all([node // topk for node in path] == list(range(step + 1)) for path in paths)
            if step:
                beams = [path[-2] % topk for path in paths]
                crossed += any(beam != k for k, beam in enumerate(beams))
                collapsed += len(set(beams)) == 1
            for k, path in enumerate(paths):
                check_path(spy.draft, calls, features, text, b, topk, path)
                assert path[-1] == step * topk + k
    assert crossed, "no beam changed its parent: the test shows nothing"
    assert collapsed or topk > 3


def dense_features(target: TinyTarget, tokens: list[int]) -> torch.Tensor:
    """The target's features of ``tokens``, from scratch."""
    ids = torch.tensor(tokens, device=target.device)
    positions = torch.arange(len(tokens), device=target.device)
    return target.forward(ids, positions, DenseAttend(target.layers)).hidden_states


def check_path(draft, calls, features, text, b, topk, path) -> None:
    """Draft one path alone, token by token over a dense prefix, and compare its last node."""
    attend = DenseAttend(draft.layers)
    length = len(text) - 1
    positions = torch.arange(length, device=features.device)
    ids = torch.tensor(text[1:], device=features.device)
    out = draft.forward(ids, draft.combine(features), positions, attend)
    hidden = out.hidden_states[-1:]
    for step, node in enumerate(path):
        row = b * topk + node % topk
        call = calls[step]
        assert call.positions[row] == length + step
        torch.testing.assert_close(call.hidden_in[row], hidden[0], rtol=1e-4, atol=1e-4)
        out = draft.forward(
            torch.tensor(call.tokens[row : row + 1], device=features.device),
            hidden,
            torch.tensor([length + step], device=features.device),
            attend,
        )
        hidden = out.hidden_states
    torch.testing.assert_close(call.logits[row], out.logits[0], rtol=1e-4, atol=1e-4)


@sampled(star, setting=[(4, 4, 16), (5, 1, 6), (5, 4, 4)], page_size=[1, 16])
def test_draft_kv_after_extend_equals_a_prefill_from_scratch(setting, page_size):
    """R52: nothing of a rejected node stays, nothing approximate either."""
    target, draft = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    config = SpecConfig(*setting, 128, 3, page_size)
    run = Engine(target, draft, config, buckets=[3])
    run.add([Request(p, 60) for p in PROMPTS])
    for _ in range(6):
        run.step()
    for live in run.running:
        text = live.tokens
        assert len(text) == live.length + 1
        fresh = Engine(target, draft, config, buckets=[1])
        fresh.add([Request(text[:-1], 60)])
        assert fresh.running[0].result.tokens[-1] == live.result.tokens[-1]
        for ours, scratch in ((run.target, fresh.target), (run.draft, fresh.draft)):
            for pool in ("k", "v"):
                a = kv_of(run, getattr(ours.pool, pool), live.row, live.length)
                b = kv_of(fresh, getattr(scratch.pool, pool), fresh.running[0].row, live.length)
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def kv_of(run: Engine, pool: torch.Tensor, row: int, length: int) -> torch.Tensor:
    return pool[:, run.table.req_to_token[row, :length].long()]
