"""R62: sglang#26163.

Trees of topk > 1 gave fewer hidden states than tokens were accepted.

Whatever path of a tree is accepted, and however long, the extend reads one row of the target's
features per token of it, that of the token's own node, and the next proposals start where those of
a prompt of the same text do.
"""

from __future__ import annotations

import pytest
import torch

from specattn.batch import AcceptResult
from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from tests.engines import engine as tiny_engine
from tests.tiny import DenseAttend, TinyDraft, TinyTarget
from tests.worlds import BACKENDS, DEVICE

PROMPT, STEPS = [3, 14, 15, 9, 26, 5], 7
CONFIG = SpecConfig(STEPS, 8, 64, 128, 1)


def engine(backend) -> Engine:
    # sure enough of itself for trees that are as deep as may be
    models = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE, sharp=5.0)
    return tiny_engine(CONFIG, models=models, backend=backend, buckets=[1])


def path_of(tree, depth: int) -> list[int]:
    """The nodes from the root to the least probable one of this depth."""
    seen = [word & (1 << 64) - 1 for word in tree.words[0, :, 0].tolist()]
    word = [word for word in seen if word.bit_count() == depth + 1][-1]
    return [node for node in range(len(seen)) if word >> node & 1]


def kept(path: list[int], tree, logits) -> AcceptResult:
    """The path as a step would accept it, with the target's own token behind it."""
    bonus = int(logits[0, path[-1]].argmax())
    tokens = [*tree.tokens[0, path[1:]].tolist(), bonus]
    rest = STEPS + 1 - len(path)
    return AcceptResult(
        accept_index=torch.tensor([path + [-1] * rest], dtype=torch.int32, device=DEVICE),
        accept_tokens=torch.tensor([tokens + [0] * rest], device=DEVICE),
        accept_lens=torch.tensor([len(path)], dtype=torch.int32, device=DEVICE),
        bonus_tokens=torch.tensor([bonus], device=DEVICE),
    )


@pytest.mark.parametrize("length", range(1, STEPS + 2))
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_the_extend_reads_a_row_per_token(backend, length):
    run = engine(backend)
    run.add([Request(PROMPT, 64)])
    (live,) = run.running
    run.table.reserve([live.row], [live.length + CONFIG.reserve_len])
    step = run.decoder(CONFIG).phases([live.row])
    step.begin()
    tree = step.draft()
    logits, features = step.verify(tree)
    path = path_of(tree, length - 1)
    assert length == 1 or path != list(range(length)), "rows of the tree would do"
    accepted = kept(path, tree, logits)
    step.commit(accepted, features)
    text = [*live.tokens, *accepted.accept_tokens[0, :length].tolist()]
    ids = torch.tensor(text[:-1], device=DEVICE)
    positions = torch.arange(len(ids), device=DEVICE)
    target = run.target.model
    want = target(ids, positions, DenseAttend(target.layers)).hidden_states[-length:]
    torch.testing.assert_close(step.buffers.features[0, :length], want, rtol=1e-4, atol=1e-4)
    step.advance(accepted, step.extend(accepted))
    fresh = engine(backend)
    fresh.add([Request(text[:-1], 64)])
    (other,) = fresh.running
    assert other.tokens == text
    for name, ours in run.states.drafting.items():
        theirs = fresh.states.drafting[name][other.row]
        torch.testing.assert_close(ours[live.row], theirs, rtol=1e-3, atol=1e-4)
