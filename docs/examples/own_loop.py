"""Speculative decoding in a loop of one's own: two requests, greedy, the shipped pair.

    python docs/examples/own_loop.py

from the project's root, after `pip install '.[models]'` there; with only its dependencies, put
`PYTHONPATH=.` before it.
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

import torch

from specattn import (
    Prefill,
    Prompt,
    SamplingBatch,
    SamplingParams,
    SpecConfig,
    StepDecoder,
    StepSetup,
)
from specattn.models import HFTarget, load_draft

if TYPE_CHECKING:
    from collections.abc import Collection

PAIR = files("specattn") / "pair"
PROMPTS = ["def read_config(path):", "class Point:\n    def __init__(self, x, y):"]


def until_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """Return a step's tokens up to the first end token."""
    for at, token in enumerate(tokens):
        if token in ends:
            return tokens[: at + 1]
    return tokens


def main(new_tokens: int = 48) -> list[str]:
    """Return the texts that continue the prompts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = SpecConfig(
        num_steps=4, topk=2, num_draft_tokens=8, max_context_len=512, max_num_reqs=len(PROMPTS)
    )

    # the models; a draft says which of the target's hidden states it reads
    target = HFTarget.from_pretrained(str(PAIR / "target"), dtype=torch.float32, device=device)
    draft = load_draft(str(PAIR / "draft"), target)
    target = target.with_features(draft.features)

    # what steps need: a pool of KV per model, and attention over it; one table of slots, which both
    # address through; and what steps leave for each other, on the device, a row per request
    setup = StepSetup.over(target, draft, config)
    table, states = setup.table, setup.states

    # the prompts: a row each, slots for every token, one forward of both models
    prompts = [target.tokenizer(text).input_ids for text in PROMPTS]
    rows, lens = [table.allocate() for _ in prompts], [len(ids) for ids in prompts]
    table.reserve(rows, lens)
    sampling = SamplingBatch.of([SamplingParams()] * len(prompts), device)
    start = Prefill.of(setup).run(
        [Prompt(*one) for one in zip(rows, prompts, strict=True)], sampling
    )
    states.admit(
        torch.tensor(rows, device=device),
        torch.tensor(lens, dtype=torch.int32, device=device),
        start.bonus_tokens,
        start.state,
        sampling,
    )
    texts = {row: [token] for row, token in zip(rows, start.bonus_tokens.tolist(), strict=True)}
    length = dict(zip(rows, lens, strict=True))  # of requests that still run

    # the steps: all of a step is captured here, once, and launched before the last one is read
    decoder = StepDecoder.of(setup, buckets=[len(prompts)])
    flying = None
    while length:
        # slots for this step, and for all that the step in flight may gain
        room = config.reserve_len + (config.num_steps + 1 if flying else 0)
        table.reserve(list(length), [tokens + room for tokens in length.values()])
        launched = list(length), decoder.step_async(list(length))
        for row, tokens in zip(flying[0], flying[1].wait(), strict=True) if flying else ():
            if row not in length:
                continue  # it had ended, and rode along
            length[row] += len(tokens)
            table.commit(row, length[row])
            texts[row] += until_end(tokens, target.eos_token_ids)
            if len(texts[row]) >= new_tokens or texts[row][-1] in target.eos_token_ids:
                del length[row]
                table.free(row)
        flying = launched
    return [target.tokenizer.decode(texts[row][:new_tokens]) for row in rows]


if __name__ == "__main__":
    for prompt, text in zip(PROMPTS, main(), strict=True):
        print(f"{prompt}{text}\n")
