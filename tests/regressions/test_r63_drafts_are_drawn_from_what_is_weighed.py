"""R63: huggingface/transformers#47932, deepseek-ai/DeepSpec#31.

Rejection sampling weighed drafts by another law than they were drawn from: one of another dtype, or
one from before processors.

The law that a draft is drawn from is the one that is kept for its verification, in float32 from
logits of any dtype; and what is emitted has the target's law, however that is cut.
"""

from __future__ import annotations

import pytest
import torch

from specattn.batch import DraftTree
from specattn.config import SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.kernels.sampling import DRAFT, uniform
from specattn.speculative.proposers.draft import choose_tokens
from specattn.speculative.sampling.params import SamplingBatch, SamplingParams
from specattn.speculative.step.verify import accept
from tests.distributions import pearson
from tests.processors import drawn_from
from tests.tiny import TinyDraft, TinyTarget
from tests.worlds import DEVICE

TEMPERATURES = [0.3, 0.8, 1.0, 2.0]
ROWS = 64
DRAWS = 100_000
TARGET = [1.0, -0.5, 2.0, 0.25, -1.0, 1.5, 0.0]
CHOICE = [-0.6, 1.7, 1.1, -0.3, 1.9, 0.1, 0.4]
CUTS = {
    "top-k": SamplingParams(1.0, top_k=3, seed=0),
    "top-p": SamplingParams(1.0, top_p=0.6, seed=0),
    "cold": SamplingParams(0.3, seed=0),
    "hot": SamplingParams(2.0, seed=0),
    "min-p": SamplingParams(1.5, min_p=0.3, seed=0),
    "all": SamplingParams(1.2, top_k=5, top_p=0.9, min_p=0.1, seed=0),
}


def drawn(tokens, probs, coins) -> None:
    """Each token is where its coin falls, by a float64 sampler of its own."""
    edges, at = probs.cumsum(1), coins.double()[:, None]
    # a coin on an edge says nothing
    sure = (edges - at).abs().amin(1) > 1e-5
    assert float(sure.float().mean()) > 0.95
    assert torch.equal(tokens[sure], torch.searchsorted(edges, at).flatten()[sure])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@torch.no_grad()
def test_what_is_drawn_comes_from_what_is_kept(dtype, monkeypatch):
    """Every draft of a step."""
    models = TinyTarget(device=DEVICE, dtype=dtype), TinyDraft(device=DEVICE, dtype=dtype)
    config = SpecConfig(3, 1, 4, 32, ROWS, draft_sampling=True)
    run = Engine(*models, config, buckets=[ROWS])
    run.add(
        Request([3, 14, 15, 9], 9, SamplingParams(TEMPERATURES[seed % 4], seed=seed))
        for seed in range(ROWS)
    )
    rows = [live.row for live in run.running]
    run.table.reserve(rows, [live.length + config.reserve_len for live in run.running])
    made, forward = [], models[1].forward

    def spy(*args, **named):
        made.append(forward(*args, **named))
        return made[-1]

    monkeypatch.setattr(models[1], "forward", spy)
    step = run.decoder(config).phases(rows)
    step.begin()
    tree = step.draft()
    assert len(made) == 2
    temperature = torch.tensor(TEMPERATURES, device=DEVICE).repeat(ROWS // 4).double()
    seeds = torch.arange(ROWS, device=DEVICE)
    for depth, out in enumerate(made, 2):
        assert out.logits.dtype == dtype
        probs = (out.logits.double() / temperature[:, None]).softmax(1)
        kept = tree.draft_probs[:, depth - 1]
        torch.testing.assert_close(kept.double(), probs, rtol=1e-5, atol=1e-9)
        # the token that it follows lies so far behind the root
        after = torch.full_like(seeds, 4 + depth - 1)
        drawn(tree.tokens[:, depth], probs, uniform(seeds, after, DRAFT))


@pytest.mark.parametrize("cut", CUTS)
def test_what_is_emitted_has_the_targets_distribution(cut):
    params, draft = CUTS[cut], TinyDraft(device=DEVICE)
    seeds = torch.arange(DRAWS, device=DEVICE)
    one = SamplingBatch.of([params], torch.device(DEVICE))
    params_of = (one.temperature, one.top_k, one.top_p, one.min_p)
    *cuts, min_p = (None if x is None else x.expand(DRAWS).contiguous() for x in params_of)
    sampling = SamplingBatch(False, *cuts, seeds, min_p)
    logits = torch.tensor(CHOICE, dtype=torch.bfloat16).to(DEVICE).expand(DRAWS, -1)
    zeros = torch.zeros_like(seeds)
    _, ids, dense = choose_tokens(draft, logits.contiguous(), 1, sampling, zeros)
    probs = (logits.double() / params.temperature).softmax(1)
    drawn(ids[:, 0], probs, uniform(seeds, zeros, DRAFT))
    tokens = torch.cat([torch.zeros_like(ids), ids], 1)
    links = torch.tensor([1, -1], device=DEVICE), torch.tensor([-1, -1], device=DEVICE)
    tree = DraftTree(
        tokens,
        tokens,
        tokens[:, :, None],
        *(link.expand(DRAWS, -1).contiguous() for link in links),
        dense[:, None],
    )
    target = torch.tensor(TARGET, device=DEVICE).expand(DRAWS, 2, -1).contiguous()
    config = SpecConfig(1, 1, 2, draft_sampling=True)
    found = accept(tree, target, torch.zeros_like(seeds).int(), config, sampling)
    counts = found.accept_tokens[:, 0].bincount(minlength=len(TARGET)).tolist()
    assert pearson(counts, drawn_from(TARGET, params)) > 1e-4
    assert 0.02 < float((found.accept_lens == 2).float().mean()) < 0.9
