"""A verify length per request: what steps take, and what a batch of mixed requests gains.

Steps of an 8B target with a DFlash head, whose requests verify whole trees of one size, or share as
many rows: all settings in turn, after their logits were compared with float64. Then greedy texts of
the shipped pair: at every token a tree is drafted and verified as a whole, so that it is known what
any share of the rows would have gained. Batches walk through these texts, each setting by itself.

    python -m bench.verify_len [--batch 16,64] [--context 4096] [--commit SHA] [--out FILE]
    python -m bench.verify_len --part texts --device cpu    # what requests gain, without a GPU
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.acceptance import held_out_prompts
from bench.shipped import pair
from bench.step_blocks import BLOCK, BlockSetting, BlockWorld, measure
from bench.step_world import PLAIN, shapes
from bench.suite.machine import machine
from bench.suite.results import write
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from specattn.kernels.ragged import naive
from specattn.kernels.tree import best_first_tree
from specattn.speculative.ragged import steps_saved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from bench.step_world import Setting
    from specattn.speculative.ragged import VerifyPolicy
    from specattn.speculative.step import Step

OUT = Path(__file__).parent / "results" / "verify_len.json"
DEPTH = BLOCK - 1
# texts of the shipped pair, tokens of each, and the steps that a batch takes through them
TEXTS, TOKENS, WALK = 96, 160, 400


@dataclass(frozen=True)
class SharedSetting(BlockSetting):
    """Best-first trees of ``nodes``, of which requests verify ``verify_len`` on average."""

    verify_len: int = 0
    chunk: int = 8
    # a key of `POLICIES`
    share: str = "chunks"

    @property
    def name(self) -> str:
        share = f"by {self.chunk}" if self.share == "chunks" else self.share
        return f"{self.verify_len} of {self.nodes} {share}"

    @property
    def policy(self) -> VerifyPolicy:
        return POLICIES[self.share]

    @property
    def rows(self) -> int:
        return self.verify_len

    def config(self, longest: int, reqs: int) -> SpecConfig:
        whole = super().config(longest, reqs)
        return replace(whole, verify_len=self.verify_len, verify_chunk=self.chunk)


def _even(probs: Tensor, rows: Tensor) -> Tensor:
    """Say of all trees that their nodes are worth less and less."""
    return torch.linspace(1, 0, probs.shape[1], device=probs.device).repeat(len(probs), 1)


def _probable(probs: Tensor, rows: Tensor) -> Tensor:
    """Count tokens, whoever gains them."""
    return probs


#: What the library does, by the draft's probabilities, and equally: what sharing costs by itself.
POLICIES: dict[str, VerifyPolicy] = {
    "chunks": steps_saved,
    "by probability": _probable,
    "each": _even,
}
WHOLE = tuple(BlockSetting(1, DEPTH, nodes) for nodes in (4, 6, 8, 16, 32, 64))
SHARED = (
    SharedSetting(1, DEPTH, 16, verify_len=4, chunk=1),
    SharedSetting(1, DEPTH, 16, verify_len=6, chunk=1),
    SharedSetting(1, DEPTH, 32, verify_len=8, chunk=2),
    SharedSetting(1, DEPTH, 64, verify_len=16, chunk=4),
    SharedSetting(1, DEPTH, 64, verify_len=32),
)
EVEN = (
    SharedSetting(1, DEPTH, 64, verify_len=16, share="each"),
    SharedSetting(1, DEPTH, 64, verify_len=32, share="each"),
)
# what texts gain by another policy; a step takes as long
OTHER = tuple(
    replace(setting, share="by probability") for setting in SHARED if setting.verify_len in (4, 16)
)
# how often steps are timed in turn: medians of few turns differ by percents between equal kernels
TURNS = 9


@dataclass(frozen=True)
class Text:
    """What drafting would gain at every token of a text.

    Parameters
    ----------
    probs : Tensor
        ``[P, n]`` float32, the probability of the path down to each node.
    path : Tensor
        ``[P, depth]`` int64, the nodes that the target keeps, ascending; n past their end.
    """

    probs: Tensor
    path: Tensor


def texts(device: str, count: int, tokens: int, nodes: int) -> list[Text]:
    """Decode held-out prompts greedily, a token at a time; return what each tree would gain."""
    target, draft = pair(device, torch.float32, kind="dflash")
    prompts = held_out_prompts(count, target.tokenizer)
    longest = len(prompts[0]) + tokens + nodes + BLOCK
    config = SpecConfig(DEPTH, 1, nodes, longest, count, tree="best_first", ranks=8)
    engine = Engine(target, draft, config, buckets=[count], graphs=False)
    engine.add([Request(prompt, tokens + 1, ignore_eos=True) for prompt in prompts])
    rows = [live.row for live in engine.running]
    engine.table.reserve(rows, [longest] * count)
    found = []
    with torch.no_grad():
        for _ in range(tokens):
            found.append(_one_token(engine.decoder(engine.config).phases(rows)))
    engine.clear()
    probs, paths = (torch.stack(parts, 1).cpu() for parts in zip(*found, strict=True))
    return [Text(*each) for each in zip(probs, paths, strict=True)]


def _one_token(step: Step) -> tuple[Tensor, Tensor]:
    """Draft and verify a tree, keep the bonus token alone; return probabilities and path."""
    step.begin()
    proposal = step.propose()
    tree = step.build_tree(proposal)
    probs = torch.empty(tree.tokens.shape, device=tree.tokens.device)
    best_first_tree(
        proposal.log_probs,
        proposal.tokens,
        step.buffers.roots,
        step.buffers.seq_lens,
        tokens_out=tree.tokens,
        positions_out=tree.positions,
        words_out=tree.words,
        next_token_out=tree.retrieve_next_token,
        next_sibling_out=tree.retrieve_next_sibling,
        scores_out=probs,
    )
    logits, features = step.verify(tree)
    kept = step.accept(tree, logits)
    path = kept.accept_index.long()
    path = torch.where(path < 0, probs.shape[1], path)[:, 1:].clone()
    kept.accept_lens.fill_(1)
    kept.accept_index[:, 1:] = -1
    kept.bonus_tokens.copy_(kept.accept_tokens[:, 0])
    kept.accept_tokens[:, 1:] = 0
    step.commit(kept, features)
    step.advance(kept, step.extend(kept))
    return probs.exp(), path


def walk(found: Sequence[Text], setting: BlockSetting, batch: int, steps: int) -> dict[str, Any]:
    """Let a batch decode the texts, one after another on every place; return what steps gain."""
    at = [(place * len(found) // batch % len(found), 0) for place in range(batch)]
    rows = torch.ones(batch, dtype=torch.int64)
    lens = torch.full((batch,), setting.nodes, dtype=torch.int32)
    gained, verified = 0, []
    for _ in range(steps):
        if isinstance(setting, SharedSetting):
            probs = torch.stack([found[text].probs[token] for text, token in at])
            worth = setting.policy(probs, rows)
            chunks = batch * setting.verify_len // setting.chunk
            naive.share_rows(worth[:, : setting.nodes], rows, setting.chunk, chunks, lens)
            verified += lens.tolist()
        for place, (text, token) in enumerate(at):
            # nodes of a path ascend, so those that are verified come first
            gain = 1 + int((found[text].path[token] < lens[place]).sum())
            gained += min(gain, len(found[text].probs) - token)
            token += gain
            at[place] = (text, token) if token < len(found[text].probs) else _next(text, found)
    spread = statistics.quantiles(verified, n=10) if verified else []
    return {
        "setting": setting.name,
        "batch": batch,
        "tokens_per_step": round(gained / (steps * batch), 4),
        "verified_p10": spread[0] if spread else setting.nodes,
        "verified_p90": spread[-1] if spread else setting.nodes,
    }


def _next(text: int, found: Sequence[Text]) -> tuple[int, int]:
    return (text + 1) % len(found), 0


def spread(found: Sequence[Text], nodes: int) -> list[float]:
    """Return what trees of ``nodes`` gain per text, in tenths of the texts."""
    gains = [float((one.path < nodes).sum(1).double().mean()) + 1 for one in found]
    return [round(gain, 3) for gain in statistics.quantiles(gains, n=10)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("all", "steps", "texts"), default="all")
    parser.add_argument("--batch", default="16,64")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--texts", type=int, default=TEXTS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    batches = [int(text) for text in options.batch.split(",")]
    record: dict[str, Any] = {"format": 1, "machine": machine(options.commit)}
    if options.part != "steps":
        found = texts(options.device, options.texts, options.tokens, WHOLE[-1].nodes)
        record |= {
            "texts": options.texts,
            "tokens": options.tokens,
            "texts_device": options.device,
            "tokens_per_step_by_text": spread(found, WHOLE[-1].nodes),
            "gains": [
                walk(found, setting, batch, WALK)
                for batch in batches
                for setting in (*WHOLE, *SHARED, *OTHER)
            ],
        }
        write(record, options.out)
        for gain in record["gains"]:
            print(gain, flush=True)
    if options.part != "texts":
        record |= {"model": "Llama-3.1-8B", "context": options.context, "cells": []}
        for cell in _steps(batches, options.context, options.rounds):
            record["cells"].append(cell)
            write(record, options.out)


def _steps(batches: Sequence[int], context: int, rounds: int) -> Any:
    from bench.suite import roofs

    copy_tb_s = roofs.measure(rounds)["copy_tb_s"]
    shape = shapes(context + 256)["Llama-3.1-8B"]
    world = BlockWorld(shape, [context] * max(batches), torch.device("cuda"))
    # what shares equally comes next to the whole trees it is compared with
    even = {setting.verify_len: setting for setting in EVEN}
    pairs = [(whole, even[whole.nodes]) if whole.nodes in even else (whole,) for whole in WHOLE]
    settings: list[Setting] = [PLAIN, *chain.from_iterable(pairs), *SHARED]
    places = [(batch, context) for batch in batches]
    options = {"length": 2, "rounds": rounds, "turns": TURNS, "copy_tb_s": copy_tb_s}
    for cell, _ in measure(world, settings, places, **options):
        yield cell


if __name__ == "__main__":
    main()
