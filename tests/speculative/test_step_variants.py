"""Steps launch what was compiled for those of other batch sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from bench.random_models import random_eagle3, random_target
from bench.tools.compile_targets import HOPPER, Notes
from specattn.backends import triton as triton_backend
from specattn.config import SpecConfig
from specattn.models.fused import projection
from specattn.speculative.sampling.processors import ProcessorStates
from specattn.speculative.step.decoder import StepDecoder
from specattn.speculative.step.level import Level
from specattn.speculative.step.setup import StepSetup
from tests.speculative.test_prompt_variants import variant

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
MOST, CONTEXT, SLOTS = 64, 64, 256
# rows of so many tokens are split among 16 programs, and among fewer from 9 requests on
LLAMA = LlamaConfig(
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=64,
    num_hidden_layers=2,
    vocab_size=16 * 2048,
    max_position_embeddings=CONTEXT,
)
TREE = SpecConfig(2, 4, 16, CONTEXT, MOST)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], set[tuple[Any, ...]]]:
    """What the steps of a batch size are compiled for, of greedy, drawn and processed requests.

    Nothing is computed: the launches are those of a GPU, over tensors of the CPU.
    """

    def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.new_empty(*x.shape[:-1], len(weight))

    def embedded(ids: Tensor, weight: Tensor, *_: Any) -> Tensor:
        # nobody has written the tokens
        return weight.new_empty(*ids.shape, weight.shape[1])

    monkeypatch.setattr(triton_backend, "platform_reasons", lambda *_: [])
    monkeypatch.setattr(triton_backend, "interpret", lambda: None)
    monkeypatch.setattr(torch.nn.functional, "linear", product)
    # a CPU is slow in float16
    monkeypatch.setattr(projection, "linear", product)
    monkeypatch.setattr(torch.nn.functional, "embedding", embedded)
    target = random_target(LLAMA, dtype=torch.float16, device=CPU)
    head = random_eagle3(LLAMA, target, 2048)
    setup = StepSetup.over(
        target.with_features(head.features), head, TREE, num_slots=SLOTS, backend="triton"
    )
    processors = ProcessorStates.alloc(MOST + 1, target.vocab_size, CPU)

    def of(batch: int) -> set[tuple[Any, ...]]:
        with Notes(HOPPER).taken() as notes:
            StepDecoder.of(setup, buckets=[batch], levels=[Level.SAMPLED], processors=processors)
        return {variant(launch) for launch in notes.launches}

    return of


def test_further_batch_sizes_compile_nothing(
    captured: Callable[[int], set[tuple[Any, ...]]],
) -> None:
    """A server captures dozens of sizes before it serves, and at first nothing is compiled."""
    # attention merges its parts by tiles of their own for 1, 2, and 3 or 4 requests; plans go
    # through blocks of 16, 32 and 64
    known = set().union(*map(captured, (1, 2, 4, 16, 32, 64)))
    assert len({name for name, *_ in known}) > 20
    for batch in (3, 8, 12, 24, 40, 48):
        assert captured(batch) <= known, batch
