"""Loaded models through the whole loop: speculation must not change what transformers generates."""

from __future__ import annotations

import pytest
import torch

from specattn import SpecConfig
from specattn.cache.kv_pool import KVPool
from specattn.engine.engine import Engine, Request
from specattn.errors import ModelError
from specattn.models import HFTarget, load_draft
from specattn.speculative.model import ModelSlot
from specattn.speculative.step.decoder import StepDecoder
from specattn.speculative.step.setup import StepSetup
from tests.models.heads import VD, eagle3_tensors, eagle_tensors, write

PROMPTS = [[5, 17, 3, 99, 42, 8, 61], [23], [7, 7, 80, 12, 55, 31, 2, 64, 19, 28, 77]]
NEW = 8


def greedy(model: torch.nn.Module, prompt: list[int], count: int = NEW) -> list[int]:
    text = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize(
    ("version", "model_type", "changes"),
    [
        ("eagle", "llama", {}),
        ("eagle3", "mistral", {"sliding_window": 6}),
        ("eagle3", "gemma2", {"sliding_window": 5}),
    ],
)
def test_speculation_generates_what_transformers_does(
    tiny, tmp_path, version, model_type, changes
) -> None:
    model = tiny(model_type, num_hidden_layers=4, **changes)
    want = [greedy(model, prompt) for prompt in PROMPTS]
    target = HFTarget.from_model(model)
    tensors = eagle_tensors() if version == "eagle" else eagle3_tensors()
    draft_vocab = {} if version == "eagle" else {"draft_vocab_size": VD}
    head = load_draft(write(tmp_path, tensors, **draft_vocab), target)

    config = SpecConfig(num_steps=3, topk=3, num_draft_tokens=9, max_context_len=64, max_num_reqs=4)
    engine = Engine(
        target.with_features(head.features), head, config, backend="torch_native", graphs=False
    )
    requests = [Request(p, max_new_tokens=NEW, ignore_eos=True) for p in PROMPTS]
    results = engine.generate(requests)

    assert [result.tokens for result in results] == want
    assert all(result.steps for result in results)


def test_longrope_is_served_up_to_where_it_rescales_and_refused_beyond(tiny, tmp_path) -> None:
    """Past that, keys in the pool and other requests of the batch would be rotated wrongly."""
    limit = 24
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": limit,
        "short_factor": [1.0] * 8,
        "long_factor": [8.0] * 8,
    }
    changes = {"rope_parameters": rope, "original_max_position_embeddings": limit}
    model = tiny("phi3", head_dim=16, num_hidden_layers=4, **changes)
    want = [greedy(model, prompt, limit + 1 - len(prompt)) for prompt in PROMPTS]
    target = HFTarget.from_model(model)
    head = load_draft(write(tmp_path, eagle3_tensors(), draft_vocab_size=VD), target)
    target = target.with_features(head.features)

    def engine(context: int) -> Engine:
        config = SpecConfig(3, 3, 9, max_context_len=context, max_num_reqs=4)
        return Engine(target, head, config, backend="torch_native", graphs=False)

    results = engine(limit).generate([Request(p, 99, ignore_eos=True) for p in PROMPTS])
    # other requests go on when one is at its end: what they compute does not change
    assert [result.tokens for result in results] == want
    assert {result.finish_reason for result in results} == {"context"}
    with pytest.raises(ModelError, match=r"'longrope'.*max_context_len must be at most 24, got 25"):
        engine(limit + 1)
    # so is one's own loop
    config = SpecConfig(0, 1, 1, max_context_len=limit + 1, max_num_reqs=1)
    with pytest.raises(ModelError, match=r"max_context_len must be at most 24, got 25"):
        StepSetup.over(target, None, config, backend="torch_native")
    slot = ModelSlot.of(target, KVPool(target.layers, 64, "cpu"), "torch_native")
    setup = StepSetup.over(slot, None, config)
    with pytest.raises(ModelError, match=r"max_context_len must be at most 24, got 25"):
        StepDecoder.of(setup)
