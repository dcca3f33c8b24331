"""JSON that always matches a schema, written by the shipped pair.

The pair knows Python, not JSON: a text without a grammar, which runs in the same batch, is none.

    python docs/examples/grammars.py

from the project's root, after `pip install '.[grammar]'` there.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import torch

from specattn import Engine, Request, SamplingParams, SpecConfig
from specattn.integrations.xgrammar import XGrammarCompiler
from specattn.models import HFTarget, load_draft

PAIR = files("specattn") / "pair"
PROMPT = "# a module of the standard library, as JSON\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "public": {"type": "boolean"},
        "versions": {"type": "array", "items": {"enum": ["3.11", "3.12", "3.13"]}, "maxItems": 3},
    },
    "required": ["name", "public", "versions"],
}


def main(samples: int = 6) -> list[dict[str, Any]]:
    """Return the values that a number of drawn texts hold."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = HFTarget.from_pretrained(str(PAIR / "target"), dtype=torch.float32, device=device)
    draft = load_draft(str(PAIR / "draft"), target)
    engine = Engine(
        target.with_features(draft.features),
        draft,
        SpecConfig(3, 2, 8, max_context_len=256, max_num_reqs=8),
    )

    # compiled once; every run of a request makes a grammar of its own
    grammar = XGrammarCompiler(target.tokenizer, target).json_schema(SCHEMA)
    prompt = target.tokenizer(PROMPT).input_ids
    drawn = SamplingParams(temperature=1.0, top_p=0.95, seed=1)
    asked = Request(prompt, 160, drawn, grammar=grammar).samples(samples)
    *outs, free = engine.generate([*asked, Request(prompt, 24)])

    texts = [target.tokenizer.decode(one.tokens, skip_special_tokens=True) for one in outs]
    print(*texts, f"without: {target.tokenizer.decode(free.tokens)!r}", sep="\n")
    return [json.loads(text) for text in texts]


if __name__ == "__main__":
    main()
