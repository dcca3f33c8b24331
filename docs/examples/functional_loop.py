"""Speculative decoding by values: what a step needs is passed to it, what it leaves is returned.

    python docs/examples/functional_loop.py

from the project's root, after `pip install .` there; with only the dependencies installed, put
`PYTHONPATH=.` before it.
"""

from __future__ import annotations

from importlib.resources import files

import torch

from specattn import (
    KVPool,
    ModelSlot,
    Prefill,
    Prompt,
    SamplingBatch,
    SamplingParams,
    SlotTable,
    SpecConfig,
)
from specattn.batch import SpecBatch
from specattn.models import HFTarget, load_draft
from specattn.speculative.decoder import SpecDecoder

PAIR = files("specattn") / "pair"
PROMPTS = ["def read_config(path):", "class Point:\n    def __init__(self, x, y):"]


def main(new_tokens: int = 48) -> list[str]:
    """Return the texts that continue the prompts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = SpecConfig(num_steps=4, topk=2, num_draft_tokens=8, max_context_len=512)

    # the models; a draft says which of the target's hidden states it reads
    target = HFTarget.from_pretrained(str(PAIR / "target"), dtype=torch.float32, device=device)
    draft = load_draft(str(PAIR / "draft"), target)
    target = target.with_features(draft.features)

    # the slots: one table, and a pool of KV per model that both address through it
    slots = 1 + len(PROMPTS) * config.max_context_len
    table = SlotTable(
        max_num_reqs=len(PROMPTS),
        max_context_len=config.max_context_len,
        num_slots=slots,
        device=device,
    )
    of_target = ModelSlot.of(target, KVPool(target.layers, slots, device), "auto")
    of_draft = ModelSlot.of(draft, KVPool(draft.layers, slots, device), "auto")

    # the prompts: a row each, slots for every token, one forward of both models
    prompts = [target.tokenizer(text).input_ids for text in PROMPTS]
    rows, lens = [table.allocate() for _ in prompts], [len(ids) for ids in prompts]
    table.reserve(rows, lens)
    sampling = SamplingBatch.of([SamplingParams()] * len(prompts), device)
    prefill = Prefill(of_target, of_draft, table.req_to_token, config)
    start = prefill.run([Prompt(*one) for one in zip(rows, prompts, strict=True)], sampling)
    bonus, state = start.bonus_tokens, start.state
    texts = [[token] for token in bonus.tolist()]

    # the steps: everything a graph may replay is captured here, once
    decoder = SpecDecoder(of_target, of_draft, config, table.req_to_token, buckets=[len(prompts)])
    while min(map(len, texts)) < new_tokens:
        table.reserve(rows, [length + config.reserve_len for length in lens])
        on_host = torch.tensor(lens, dtype=torch.int32)
        batch = SpecBatch(torch.tensor(rows, device=device), on_host.to(device), on_host, bonus)
        result = decoder.step(batch, state, sampling)
        bonus, state = result.accepted.bonus_tokens, result.state
        gained, tokens = result.accepted.accept_lens.tolist(), result.accepted.accept_tokens
        for at, count in enumerate(gained):
            texts[at] += tokens[at, :count].tolist()
            lens[at] += count
            table.commit(rows[at], lens[at])
    for row in rows:
        table.free(row)
    return [target.tokenizer.decode(tokens[:new_tokens]) for tokens in texts]


if __name__ == "__main__":
    for prompt, text in zip(PROMPTS, main(), strict=True):
        print(f"{prompt}{text}\n")
