"""A proposer from outside the library: a table of which token follows which."""

import torch

from specattn import Engine, Request, SpecConfig
from specattn.batch import Candidates
from specattn.models import HFTarget
from specattn.models.hub import PAIR
from specattn.speculative.proposers.proposer import BoundProposer, Proposer

PROMPTS = ["The quick brown fox", "def main():"]


class BigramProposer(Proposer):
    """Proposes what most often followed the newest token, and so on.

    Parameters
    ----------
    text : Tensor
        ``[T]`` int64, tokens that followed each other somewhere.
    vocab_size : int
        V, the target's.
    topk : int
        Followers to keep per token: the most that a config asks for.
    device : torch.device or str
        Where the target is.
    """

    def __init__(self, text, vocab_size, topk, device):
        pairs = text[:-1] * vocab_size + text[1:]
        counts = torch.bincount(pairs, minlength=vocab_size**2).view(vocab_size, vocab_size)
        probs = (counts + 1e-3) / (counts + 1e-3).sum(1, keepdim=True)
        found = probs.to(device, torch.float32).topk(topk)
        self.probs, self.tokens = found.values, found.indices  # [V, topk]

    def check(self, config):
        """Refuse trees that are no beams: a table has no law of a depth alone."""
        if config.tree != "beam":
            raise ValueError(f"tree must be 'beam', got {config.tree!r}")

    def bind(self, step):
        """Return what steps of so many requests run."""
        return BoundBigram(self, step)


class BoundBigram(BoundProposer):
    """The table over the buffers of one batch size."""

    def propose(self):
        """Grow beams of ``topk`` nodes, depth by depth, without a value on the host."""
        table, config, roots = self.proposer, self.step.config, self.step.buffers.roots  # [B]
        topk = config.topk
        scores, tokens = [table.probs[roots, :topk]], [table.tokens[roots, :topk]]
        parents = [torch.full_like(roots, -1)[:, None]]
        path, node = scores[0], tokens[0]  # the beam's scores and tokens, [B, topk]
        place = torch.arange(topk, device=roots.device).expand_as(node)  # flat indices
        for depth in range(config.num_draft_forwards):
            parents.append(place)
            scores.append((path[:, :, None] * table.probs[node, :topk]).flatten(1))
            tokens.append(table.tokens[node, :topk].flatten(1))
            path, best = scores[-1].topk(topk)
            node, place = tokens[-1].gather(1, best), topk + depth * topk**2 + best
        drawn_from = path.new_empty(len(roots), config.num_steps, 0)
        return Candidates(
            torch.cat(scores, 1), torch.cat(tokens, 1), torch.cat(parents, 1), drawn_from
        )


def main(count: int = 24) -> list[str]:
    """Write ``count`` tokens after every prompt; the table comes from what the target wrote."""
    target = HFTarget.from_pretrained(PAIR / "target", dtype=torch.float32)
    plain = SpecConfig(num_steps=0, topk=1, num_draft_tokens=1, max_context_len=512)
    prompts = [target.tokenizer(text).input_ids for text in PROMPTS]
    requests = [Request(ids, max_new_tokens=count, ignore_eos=True) for ids in prompts]
    written = [result.tokens for result in Engine(target, None, plain).generate(requests)]
    text = torch.tensor([token for tokens in written for token in tokens])
    draft = BigramProposer(text, target.vocab_size, 2, target.device)
    config = SpecConfig(num_steps=3, topk=2, num_draft_tokens=8, max_context_len=512)
    results = Engine(target, draft, config).generate(requests)
    for result in results:
        print(f"{len(result.tokens) / len(result.accept_lens):.2f} tokens per step")
    return [target.tokenizer.decode(result.tokens) for result in results]


if __name__ == "__main__":
    print(*main(), sep="\n")
