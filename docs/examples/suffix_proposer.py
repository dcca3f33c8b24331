"""A proposer on the host: what followed the same tokens earlier, in any request's text."""

from collections import defaultdict, deque
from functools import partial

import torch

from specattn import Engine, Request, SpecConfig
from specattn.models import HFTarget
from specattn.models.hub import PAIR
from specattn.speculative.proposers.host import HostProposer, HostTree

PROMPTS = ["The quick brown fox", "def main():"]


class SuffixProposer(HostProposer):
    """Proposes what followed the longest match of a text's end.

    Parameters
    ----------
    longest : int
        Most last tokens that are looked for.
    places : int
        How many places to keep where the same tokens stood: the latest ones.
    """

    def __init__(self, longest=5, places=8):
        self.longest = longest
        # the texts and positions that follow a few tokens, latest first
        self.after = defaultdict(partial(deque, maxlen=places))
        # how many tokens of a request are in there
        self.read = {}

    def draft(self, requests, config):
        """Read what texts have gained; return a tree for every request."""
        for one in dict.fromkeys([*self.read, *requests]):
            self.learn(one.tokens, self.read.get(one, 1))
            self.read[one] = len(one.tokens)
        # the texts of those that have ended stay in `after`
        self.read = {one: count for one, count in self.read.items() if not one.ended}
        return [self.tree(one.tokens, config) for one in requests]

    def learn(self, text, start):
        """Note what comes before every token from ``start`` on."""
        for at in range(start, len(text)):
            for size in range(1, min(self.longest, at) + 1):
                self.after[tuple(text[at - size : at])].appendleft((text, at))

    def tree(self, text, config):
        """Merge what followed the longest match by what it has in common."""
        tokens, parents, nodes = [], [], {}
        for other, at in list(self.find(text))[: config.proposals]:
            node = -1
            for token in other[at : at + config.num_steps]:
                if (node, token) not in nodes:
                    if len(tokens) == config.num_draft_tokens - 1:
                        break
                    nodes[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = nodes[node, token]
        return HostTree(tokens, parents)

    def find(self, text):
        """Return where the longest match is followed; nowhere without any."""
        for size in range(self.longest, 0, -1):
            if found := self.after.get(tuple(text[-size:])):
                return found
        return ()


def main(count: int = 24) -> list[str]:
    """Write ``count`` tokens after every prompt, twice: the second time they are known."""
    target = HFTarget.from_pretrained(PAIR / "target", dtype=torch.float32)
    config = SpecConfig(num_steps=4, topk=2, num_draft_tokens=9, max_context_len=512)
    engine = Engine(target, SuffixProposer(), config)
    prompts = [target.tokenizer(text).input_ids for text in PROMPTS]
    for _ in range(2):
        requests = [Request(ids, max_new_tokens=count, ignore_eos=True) for ids in prompts]
        results = engine.generate(requests)
        rates = [f"{result.accepted_per_step:.2f}" for result in results]
        print("tokens per step:", *rates)
    return [target.tokenizer.decode(result.tokens) for result in results]


if __name__ == "__main__":
    print(*main(), sep="\n")
