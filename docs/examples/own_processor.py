"""A logits processor of your own: texts that repeat themselves less, request by request."""

import torch

from specattn import Engine, Request, SamplingParams, SpecConfig
from specattn.models import HFTarget, load_draft
from specattn.models.hub import PAIR
from specattn.speculative.sampling.logits_processor import LogitsProcessor, StateField

PROMPTS = ["The quick brown fox", "def main():"]


class Vary(LogitsProcessor):
    """Bans a token right after itself, and makes what has followed the newest one less probable."""

    name = "vary"

    def state_fields(self):
        """Return what it keeps per request: a number."""
        return {"penalty": StateField(1, torch.float32)}

    def admit(self, states, params, prompt):
        """Write a request's number."""
        if not isinstance(params, float):
            raise ValueError(f"vary must be a float, got {params!r}")
        states["penalty"].fill_(params)

    def process(self, logits, nodes, states):
        """Change the logits of every node by the text up to it."""
        followed = nodes.followers(1)  # [B, n, V]
        logits = logits - states["penalty"][:, None] * followed
        return logits.scatter(2, nodes.last(1), -torch.inf)


def main(count: int = 32, *, speculative: bool = True) -> list[str]:
    """Continue every prompt, as it is and varied."""
    target = HFTarget.from_pretrained(PAIR / "target", dtype=torch.float32)
    draft = load_draft(str(PAIR / "draft"), target)
    config = SpecConfig(num_steps=4, topk=2, num_draft_tokens=8, max_context_len=512)
    if speculative:
        models = target.with_features(draft.features), draft
    else:
        models, config = (target, None), config.plain()
    engine = Engine(*models, config, processors=[Vary()])
    prompts = [target.tokenizer(text).input_ids for text in PROMPTS]
    asked = (SamplingParams(), SamplingParams(processors={"vary": 6.0}))
    requests = [Request(ids, count, one, ignore_eos=True) for ids in prompts for one in asked]
    return [target.tokenizer.decode(out.tokens) for out in engine.generate(requests)]


if __name__ == "__main__":
    print(*main(), sep="\n")
