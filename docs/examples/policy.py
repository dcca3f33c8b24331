"""An engine that changes its tree from step to step, by a policy of one's own.

Requests join while others run, and steps are launched a step ahead. The texts are those of plain
decoding all the same.

    python docs/examples/policy.py

from the project's root, after `pip install '.[models]'` there; with only its dependencies, put
`PYTHONPATH=.` before it.
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

import torch

from specattn import Engine, Request, SpecConfig
from specattn.models import HFTarget, load_draft

if TYPE_CHECKING:
    from specattn.engine.policy import Observed

PAIR = files("specattn") / "pair"
PROMPTS = ["def read_config(path):", "class Point:\n    def __init__(self, x, y):", "import os\n"]
# nodes that a step may verify, over all requests
BUDGET = 16


def within_budget(observed: Observed) -> SpecConfig:
    """Return the largest tree that all requests together can afford, else the smallest there is.

    `observed.acceptance` has what recent steps gained and took, for policies that learn.
    """
    smallest, *larger = sorted(observed.configs, key=lambda config: config.num_draft_tokens)
    nodes = BUDGET // observed.batch
    return [smallest, *(config for config in larger if config.num_draft_tokens <= nodes)][-1]


def main(new_tokens: int = 48) -> list[str]:
    """Return the texts that continue the prompts."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = HFTarget.from_pretrained(str(PAIR / "target"), dtype=torch.float32, device=device)
    draft = load_draft(str(PAIR / "draft"), target)

    # settings of one engine differ in the tree alone; all are captured here
    limits = {"max_context_len": 512, "max_num_reqs": len(PROMPTS)}
    tree, chain, plain = (
        SpecConfig(*shape, **limits) for shape in ((4, 4, 16), (3, 1, 4), (0, 1, 1))
    )
    engine = Engine(
        target.with_features(draft.features),
        draft,
        tree,
        configs=[chain, plain],
        policy=within_budget,
    )

    waiting = [
        Request(target.tokenizer(text).input_ids, max_new_tokens=new_tokens) for text in PROMPTS
    ]
    results = engine.add([waiting.pop(0)])
    while engine.num_running:
        if waiting and results[0].steps >= 2:  # the others come later, and together
            results += engine.add(waiting)
            waiting = []
        for _result, _new_tokens in engine.step(ahead=True):
            pass  # stream them from here: the next step is on its way
    return [target.tokenizer.decode(result.tokens) for result in results]


if __name__ == "__main__":
    for prompt, text in zip(PROMPTS, main(), strict=True):
        print(f"{prompt}{text}\n")
