"""Attention alone: an engine with a cache, a table and masks of its own verifies trees.

    python docs/examples/own_attention.py

from the project's root, after `pip install .` there; with only the dependencies installed, put
`PYTHONPATH=.` before it.
"""

from __future__ import annotations

import torch

from specattn.attention import Attention, AttnConfig, Phase, RowLayout
from specattn.cache.external import as_slots

LAYERS, HEADS, KV_HEADS, DIM = 2, 8, 2, 64
PAGE, CONTEXT, REQUESTS = 16, 256, 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPTS = [21, 40]
# every node's parent; node 0 is the newest token
TREE = [-1, 0, 0, 1, 1, 2, 3]


class Engine:
    """What an engine has: pages per layer, a table, lengths. Nothing in here knows specattn."""

    def __init__(self) -> None:
        pages = REQUESTS * CONTEXT // PAGE + 1
        shape = (LAYERS, 2, pages, PAGE, KV_HEADS, DIM)
        self.cache = torch.zeros(shape, device=DEVICE)
        # page 0 and row 0 belong to padding
        free = 1 + torch.randperm(pages - 1).view(REQUESTS, -1)
        within = torch.arange(CONTEXT)
        table = torch.zeros(REQUESTS + 1, CONTEXT, dtype=torch.int32)
        table[1:] = free[:, within // PAGE] * PAGE + within % PAGE
        self.table = table.to(DEVICE)

    def slots(self, rows: list[int], starts: list[int], counts: list[int]) -> torch.Tensor:
        """Return the slots of new tokens, request by request."""
        pieces = zip(rows, starts, counts, strict=True)
        return torch.cat([self.table[row, at : at + count] for row, at, count in pieces])


class Model:
    """Two layers of attention with random weights."""

    def __init__(self) -> None:
        size = HEADS * DIM
        self.sizes = [size, KV_HEADS * DIM, KV_HEADS * DIM]
        self.weights = [
            (torch.randn(size, sum(self.sizes), device=DEVICE) / size**0.5, out / size**0.5)
            for out in torch.randn(LAYERS, size, size, device=DEVICE)
        ]

    def __call__(self, x: torch.Tensor, attend) -> torch.Tensor:
        """Run tokens ``[T, size]``; ``attend`` takes layer, q, k and v."""
        for layer, (qkv, out) in enumerate(self.weights):
            x = x + attend(layer, *(x @ qkv).split(self.sizes, dim=1)) @ out
        return x


def main() -> float:
    """Return how far a tree's nodes are from the same paths run as prompts."""
    engine, model = Engine(), Model()
    attention = Attention(engine.table, max_batch=REQUESTS)
    config = AttnConfig(HEADS, KV_HEADS, DIM)
    layers = [attention.layer(config, *map(as_slots, pages)) for pages in engine.cache]

    def prompt(rows: list[int], tokens: list[torch.Tensor]) -> torch.Tensor:
        """Run whole prompts."""
        counts, starts = [len(one) for one in tokens], [0] * len(rows)
        forward = attention.prompts(
            torch.tensor(rows, device=DEVICE),
            torch.tensor(starts, device=DEVICE),
            torch.tensor(counts, device=DEVICE),
            engine.slots(rows, starts, counts),
            max_q_len=max(counts),
            page_size=PAGE,
        )
        attend = lambda at, q, k, v: forward.attend(layers[at], q, k, v)  # noqa: E731
        return model(torch.cat(tokens), attend)

    rows, nodes = [1, 2], len(TREE)
    texts = [torch.randn(count, HEADS * DIM, device=DEVICE) for count in PROMPTS]
    prompt(rows, texts)

    # the engine's mask: which node sees which, the same tree for both requests
    mask = torch.eye(nodes, dtype=torch.bool)
    for node, parent in enumerate(TREE[1:], 1):
        mask[node] |= mask[parent]
    forward = attention.forward(RowLayout(nodes, nodes, Phase.VERIFY, page_size=PAGE), len(rows))
    forward.copy_in(
        torch.tensor(rows, device=DEVICE),
        torch.tensor(PROMPTS, device=DEVICE),
        engine.slots(rows, PROMPTS, [nodes] * len(rows)),
        mask=mask.expand(len(rows), -1, -1).contiguous().to(DEVICE),
    )
    drafted = torch.randn(len(rows), nodes, HEADS * DIM, device=DEVICE)
    tree = model(drafted.flatten(0, 1), lambda at, q, k, v: forward.attend(layers[at], q, k, v))

    # the same again, every path of the first request as a prompt in a row of its own
    paths = [torch.cat([texts[0], drafted[0, mask[node].to(DEVICE)]]) for node in range(nodes)]
    ends = torch.tensor([len(path) for path in paths]).cumsum(0) - 1
    alone = prompt(list(range(3, 3 + nodes)), paths)[ends.to(DEVICE)]
    return (tree[:nodes] - alone).abs().max().item()


if __name__ == "__main__":
    print(f"a tree and its paths differ by at most {main():.1e}")
