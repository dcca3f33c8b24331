"""A step phase by phase: look at the draft tree, replace a phase, own the state between steps.

    python docs/examples/phases.py

from the project's root, after `pip install '.[models]'` there; with only its dependencies, put
`PYTHONPATH=.` before it.
"""

from __future__ import annotations

from importlib.resources import files

import torch

from specattn import (
    Prefill,
    Prompt,
    SamplingBatch,
    SamplingParams,
    SpecConfig,
    StepDecoder,
    StepSetup,
    inspect,
)
from specattn.models import HFTarget, load_draft

PAIR = files("specattn") / "pair"
PROMPTS = ["def read_config(path):", "class Point:\n    def __init__(self, x, y):"]


def main(new_tokens: int = 48, *, show: bool = False) -> list[str]:
    """Return the texts that continue the prompts; draw the first step's tree if asked to."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = SpecConfig(
        num_steps=4, topk=2, num_draft_tokens=8, max_context_len=512, max_num_reqs=len(PROMPTS)
    )

    # the models; a draft says which of the target's hidden states it reads
    target = HFTarget.from_pretrained(str(PAIR / "target"), dtype=torch.float32, device=device)
    draft = load_draft(str(PAIR / "draft"), target)
    target = target.with_features(draft.features)

    # pools, attention, the table of slots, and the state between steps
    setup = StepSetup.over(target, draft, config, record=False)
    table, states = setup.table, setup.states

    # the prompts: a row each, slots for every token, one forward of both models
    prompts = [target.tokenizer(text).input_ids for text in PROMPTS]
    rows, lens = [table.allocate() for _ in prompts], [len(ids) for ids in prompts]
    table.reserve(rows, lens)
    sampling = SamplingBatch.of([SamplingParams()] * len(prompts), device)
    start = Prefill.of(setup).run(
        [Prompt(*one) for one in zip(rows, prompts, strict=True)], sampling
    )
    for row, length in zip(rows, lens, strict=True):
        table.commit(row, length)
    texts = [[token] for token in start.bonus_tokens.tolist()]

    # the state between steps is yours: a row per request, read and written on the device
    on_device = torch.tensor(rows, device=device), torch.tensor(lens, dtype=torch.int32).to(device)
    states.admit(*on_device, start.bonus_tokens, start.state, sampling)

    decoder = StepDecoder.of(setup)
    while min(map(len, texts)) < new_tokens:
        table.reserve(rows, [length + config.reserve_len for length in lens])
        with torch.no_grad():
            # what `Step.run` does, and what a CUDA graph of `decoder.step` replays
            step = decoder.phases(rows, seq_lens_cpu=torch.tensor(lens, dtype=torch.int32))
            step.begin()
            tree = step.draft()
            logits, features = step.verify(tree)
            accepted = step.accept(tree, logits)
            if show:
                print(inspect.tree(tree, target.tokenizer, accepted=accepted), end="\n\n")
                show = False
            step.commit(accepted, features)
            state = step.extend(accepted)
            step.advance(accepted, state)
        for at, (count, *tokens) in enumerate(step.packed.tolist()):
            texts[at] += tokens[:count]
            lens[at] += count
            table.commit(rows[at], lens[at])
    for row in rows:
        table.free(row)
    return [target.tokenizer.decode(tokens[:new_tokens]) for tokens in texts]


if __name__ == "__main__":
    for prompt, text in zip(PROMPTS, main(show=True), strict=True):
        print(f"{prompt}{text}\n")
