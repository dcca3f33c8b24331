"""Speculative decoding over caches and blocks of an engine's own: two requests, the shipped pair.

    python docs/examples/own_cache.py

from the project's root, after `pip install '.[models]'` there; with only its dependencies, put
`PYTHONPATH=.` before it.
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

import torch

from specattn import (
    ExternalTable,
    KVPool,
    ModelSlot,
    Prefill,
    Prompt,
    SamplingBatch,
    SamplingParams,
    SpecConfig,
    StepDecoder,
    StepSetup,
)
from specattn.cache.external import as_slots
from specattn.models import HFTarget, load_draft

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn import AttnConfig

PAIR = files("specattn") / "pair"
PROMPTS = ["def read_config(path):", "class Point:\n    def __init__(self, x, y):"]
PAGE, CONTEXT = 16, 512


class EngineCache:
    """What the engine has, and allocates: a cache per layer, and which request holds which block.

    Nothing in here knows specattn.
    """

    def __init__(
        self, models: Sequence[Sequence[AttnConfig]], requests: int, device: torch.device
    ) -> None:
        blocks = requests * CONTEXT // PAGE + 1
        self.layers = [
            [
                torch.zeros(
                    2,
                    blocks,
                    PAGE,
                    layer.num_kv_heads,
                    layer.head_dim,
                    dtype=layer.dtype,
                    device=device,
                )
                for layer in layers
            ]
            for layers in models
        ]
        self.block_table = torch.zeros(requests, CONTEXT // PAGE, dtype=torch.int32, device=device)
        self.held: list[list[int]] = [[] for _ in range(requests)]
        self.free = list(range(1, blocks))  # block 0 is never given away

    def grow(self, request: int, tokens: int) -> None:
        """Give a request blocks for so many tokens."""
        held = self.held[request]
        while len(held) * PAGE < tokens:
            held.append(self.free.pop())
            self.block_table[request, len(held) - 1] = held[-1]

    def end(self, request: int) -> None:
        """Take a request's blocks back."""
        self.free += self.held[request]
        self.held[request] = []


def pool_of(layers: Sequence[AttnConfig], caches: Sequence[torch.Tensor]) -> KVPool:
    """Return a pool over the keys and values that a model's caches hold, page by page."""
    keys, values = ([as_slots(cache[half]) for cache in caches] for half in range(2))
    return KVPool.from_external(layers, keys, values)


def main(new_tokens: int = 48) -> list[str]:
    """Return the texts that continue the prompts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = SpecConfig(
        num_steps=4, topk=2, num_draft_tokens=8, max_context_len=CONTEXT, page_size=PAGE
    )
    target = HFTarget.from_pretrained(str(PAIR / "target"), dtype=torch.float32, device=device)
    draft = load_draft(str(PAIR / "draft"), target)
    target = target.with_features(draft.features)
    count = len(PROMPTS)
    engine = EngineCache([target.layers, draft.layers], count, device)

    # the engine's caches as pools, and a table of tokens beside its table of blocks: request i is
    # row i + 1 there, because row 0 belongs to padding, as block 0 does
    pools = [
        pool_of(model.layers, caches)
        for model, caches in zip((target, draft), engine.layers, strict=True)
    ]
    slots = [ModelSlot.of(*pair, "auto") for pair in zip((target, draft), pools, strict=True)]
    table = ExternalTable(
        torch.zeros(count + 1, CONTEXT, dtype=torch.int32, device=device),
        torch.zeros(count + 1, dtype=torch.int32, device=device),
        num_slots=pools[0].num_slots,
        page_size=PAGE,
    )
    setup = StepSetup.over(*slots, config, table=table)
    rows = list(range(1, count + 1))
    on_device = torch.tensor(rows, device=device)

    def fill() -> None:
        """Tell the table what blocks the requests hold now: one launch, which nobody waits for."""
        room = torch.tensor([len(held) * PAGE for held in engine.held], dtype=torch.int32)
        table.fill(on_device, engine.block_table, room.to(device))

    # the prompts
    prompts = [target.tokenizer(text).input_ids for text in PROMPTS]
    lens = [len(ids) for ids in prompts]
    for request, length in enumerate(lens):
        engine.grow(request, length)
    fill()
    sampling = SamplingBatch.of([SamplingParams()] * count, device)
    start = Prefill.of(setup).run(
        [Prompt(*one) for one in zip(rows, prompts, strict=True)], sampling
    )
    setup.states.admit(
        on_device,
        torch.tensor(lens, dtype=torch.int32, device=device),
        start.bonus_tokens,
        start.state,
        sampling,
    )
    texts = [[token] for token in start.bonus_tokens.tolist()]

    # the steps; a request that has ended has no blocks, and sits out
    decoder = StepDecoder.of(setup, buckets=[count])
    running = set(range(count))
    while running:
        for request in running:
            engine.grow(request, lens[request] + config.reserve_len)
        fill()
        for request, gained in enumerate(decoder.step(rows)):
            texts[request] += gained
            lens[request] += len(gained)
            if request in running and len(texts[request]) >= new_tokens:
                running.remove(request)
                engine.end(request)
    return [target.tokenizer.decode(text[:new_tokens]) for text in texts]


if __name__ == "__main__":
    for prompt, text in zip(PROMPTS, main(), strict=True):
        print(f"{prompt}{text}\n")
