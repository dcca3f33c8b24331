"""Latency of everything a speculative step does besides attention and the models.

Each operation is held to its plain torch twin, then recorded many times in one CUDA graph; the
figure is the median replay over the number of calls, a graph node's own cost (``empty_1_us``)
included. Operations on the KV pool rotate over slots, so that they meet a cold cache; the others
read what a step has just written. Bytes are what must be read and written once.

    python -m bench.small_ops [--batch 1,16,64,256,512] [--only NAME] [--rounds 20] [--out FILE]
    python -m bench.small_ops --warps [--batch 1,64,256]  # the choice of num_warps, printed only
"""

from __future__ import annotations

import argparse
import importlib
import json
import traceback
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bench.suite import roofs, timing
from bench.suite.machine import machine

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from specattn.kernels.tree_attention import TreeAttention

RESULTS = Path(__file__).parent / "results"
BATCHES = (1, 16, 64, 256, 512)
WARPS = (1, 2, 4, 8)
# topk, steps, nodes with the root
TREES = ((4, 5, 16), (8, 7, 64))
# heads and width of a KV row, layers of a target, committed tokens at most, table width
HEADS, DIM, LAYERS, CONTEXT, WIDTH = 8, 128, 32, 2048, 8192
VOCAB, HIDDEN = 32000, 4096
MOST_CALLS, REPLAY_US = 64, 4e3
# operations that the target of a few microseconds is about, at batches up to 256
TARGETED = ("plan", "plans of a step", "tree", "beams", "accept greedy", "kv move, 1 layer")


@dataclass(frozen=True)
class Op:
    """One operation on one batch.

    Parameters
    ----------
    name, module : str
        As tables show it; the module under ``specattn.kernels`` and its ``reference``.
    run : callable
        Runs it with the functions of such a module; the number picks a set of slots.
    outputs : list of Tensor
        What it writes, compared whole, what it must leave alone included.
    moved : int
        Bytes read and written.
    sets : int
        How many sets of slots there are.
    differ : float
        Share of the outputs that may differ: cumulative sums round differently.
    """

    name: str
    module: str
    run: Callable[[ModuleType, int], None]
    outputs: list[Tensor]
    moved: int
    sets: int = 1
    differ: float = 0.0


@dataclass
class Step:
    """The tensors of one speculative step, as every stage would find them."""

    batch: int
    topk: int
    steps: int
    nodes: int
    device: str
    context: int = CONTEXT
    vocab: int = VOCAB
    layers: int = LAYERS
    state: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        batch, topk, steps, nodes = self.batch, self.topk, self.steps, self.nodes
        generator = torch.Generator(self.device).manual_seed(0)
        self.generator = generator
        self.lens = self.ints(self.context, batch, low=self.context // 2).int()
        self.rows = torch.randperm(batch, device=self.device, generator=generator)
        self.table = self.ints(2**24, batch, max(WIDTH, self.context)).int()
        self.count = topk + (steps - 1) * topk**2
        self.scores = torch.rand(batch, self.count, device=self.device, generator=generator)
        self.candidate_tokens = self.ints(self.vocab, batch, self.count)
        # every beam of a step continues a candidate of the step before
        parents = [torch.full((batch, 1), -1, device=self.device)]
        for step in range(steps - 1):
            start = 0 if step == 0 else topk + (step - 1) * topk**2
            width = topk if step == 0 else topk**2
            order = torch.rand(batch, width, device=self.device, generator=generator).argsort(1)
            parents.append(start + order[:, :topk])
        self.parents = torch.cat(parents, 1)
        # deep trees: a child scores a little less than its parent
        for step in range(1, steps):
            first = topk + (step - 1) * topk**2
            above = self.scores.gather(1, self.parents[:, 1 + (step - 1) * topk : 1 + step * topk])
            fade = 1 - 0.3 * torch.rand(
                batch, topk, topk, device=self.device, generator=generator
            )
            self.scores[:, first : first + topk**2] = (above[:, :, None] * fade).flatten(1)
        self.bonus = self.ints(self.vocab, batch)
        self.tree = {
            name: self.empty(batch, nodes)
            for name in ("tokens_out", "positions_out", "next_token_out", "next_sibling_out")
        }
        self.tree["words_out"] = self.empty(batch, nodes, -(-nodes // 64))
        self.accepted = {
            "accept_index_out": self.empty(batch, steps + 1).int(),
            "accept_tokens_out": self.empty(batch, steps + 1),
            "accept_lens_out": self.empty(batch).int(), "bonus_out": self.empty(batch),
        }
        twin = importlib.import_module("specattn.kernels.reference.tree")
        self.build(twin)
        self.argmax = self.deepest()

    def ints(self, high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, shape, device=self.device, generator=self.generator)

    def empty(self, *shape: int) -> Tensor:
        return torch.full(shape, -77, device=self.device)

    def build(self, ops: ModuleType, **options: int | None) -> None:
        ops.build_tree(
            self.scores, self.candidate_tokens, self.parents, self.bonus, self.lens,
            topk=self.topk, num_draft_tokens=self.nodes, **self.tree, **options,
        )

    def follow(self, ops: ModuleType, **options: int | None) -> None:
        ops.accept_greedy(*self.links(), self.argmax, **self.accepted, **options)

    def deepest(self) -> Tensor:
        """A target that follows the last child everywhere: the longest walk there is."""
        node = torch.arange(self.nodes, device=self.device)
        shift = torch.arange(64, device=self.device)
        bits = self.tree["words_out"][..., None] >> shift                    # [B, n, W, 64]
        above = (bits & 1).flatten(2)[:, :, : self.nodes].bool()
        above &= node != node[:, None]
        parent = torch.where(above, node, -1).amax(2)                        # [B, n]
        choice = self.ints(self.vocab, self.batch, self.nodes)
        for child in range(1, self.nodes):
            choice.scatter_(
                1, parent[:, child : child + 1], self.tree["tokens_out"][:, child : child + 1]
            )
        return choice

    def links(self) -> tuple[Tensor, Tensor, Tensor]:
        tree = self.tree
        return tree["tokens_out"], tree["next_token_out"], tree["next_sibling_out"]


def size(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def trees(s: Step) -> list[Op]:
    out = list(s.tree.values())
    moved = size(s.scores, s.candidate_tokens, s.parents, *out)
    return [Op("tree", "tree", lambda ops, _: s.build(ops), out, moved)]


def beams(s: Step) -> list[Op]:
    """The step between two draft forwards, and the last one, which picks nothing."""
    batch, topk, step = s.batch, s.topk, s.steps - 2
    words = -(-(s.steps - 1) * topk // 64)
    children = (
        torch.rand(batch, topk, topk, device=s.device, generator=s.generator),
        s.ints(s.vocab, batch, topk, topk),
        torch.rand(batch, topk, device=s.device, generator=s.generator),
    )
    candidates = {
        "candidate_scores": torch.zeros_like(s.scores),
        "candidate_tokens": torch.zeros_like(s.candidate_tokens),
        "candidate_parents": torch.zeros_like(s.parents),
    }
    picked = {
        "scores_out": torch.zeros(batch, topk, device=s.device), "tokens_out": s.empty(batch, topk),
        "beams_out": s.empty(batch, topk), "words_out": s.empty(batch, topk, words),
    }
    above = s.ints(2**62, batch, topk, words)
    moved = 2 * size(*children) + size(above, *picked.values())
    written = list(candidates.values())
    return [
        Op("beams", "beam", lambda ops, _: ops.select_beams(
            step, *children, above, **candidates, **picked
        ), [*written, *picked.values()], moved),
        Op("last beams", "beam", lambda ops, _: ops.append_candidates(
            step + 1, *children, **candidates
        ), written, 2 * size(*children)),
    ]


def accepts(s: Step) -> list[Op]:
    out, (tokens, first, sibling) = list(s.accepted.values()), s.links()
    moved = size(tokens, first, sibling, s.argmax, *out)
    found = [Op("accept greedy", "accept", lambda ops, _: s.follow(ops), out, moved)]
    probs = torch.rand(s.batch, s.nodes, s.vocab, device=s.device, generator=s.generator)
    # the children share most of the mass, as a draft worth its time would have it
    probs.mul_(0.5 / s.vocab).scatter_add_(
        2, tokens[:, None, :].expand(-1, s.nodes, -1),
        torch.full((s.batch, s.nodes, s.nodes), 0.75 / s.topk, device=s.device),
    )
    probs.div_(probs.sum(2, keepdim=True))
    coins, final = (
        torch.rand(s.batch, s.steps + 1, device=s.device, generator=s.generator) for _ in range(2)
    )
    row = s.batch * s.vocab * 4
    found.append(Op("accept sampled", "accept", lambda ops, _: ops.accept_sampled(
        tokens, first, sibling, probs, coins, final, **s.accepted
    ), out, row + size(tokens, first, sibling, *out), differ=0.02))
    if s.nodes > s.steps:
        chain = tokens[:, : s.steps + 1].contiguous()
        target, draft = probs[:, : s.steps + 1], probs[:, 1 : s.steps + 1]
        found.append(Op("accept rejection", "accept", lambda ops, _: ops.accept_rejection(
            chain, draft, target, coins, final, **s.accepted
        ), out, 2 * row + size(chain, *out), differ=0.02))
    return found


def kv(s: Step) -> list[Op]:
    """Moves of the accepted path, of all layers or of one, and the store of a layer's new rows."""
    importlib.import_module("specattn.kernels.reference.accept").accept_greedy(
        *s.links(), s.argmax, **s.accepted
    )
    path = s.accepted["accept_index_out"]
    sets = max(2, min(64, 128 // s.batch))
    slots = torch.randperm(sets * s.batch * s.nodes, device=s.device, generator=s.generator)
    tails = (slots + 1).int().view(sets, s.batch, s.nodes)
    shape = (s.layers, slots.numel() + 1, HEADS, DIM)
    pools = [torch.zeros(shape, dtype=torch.bfloat16, device=s.device) for _ in range(2)]
    for pool in pools:
        pool.normal_(generator=s.generator)
    row = 2 * HEADS * DIM * 2
    rank = torch.arange(path.shape[1], device=s.device)
    moving = int(((path >= 0) & (path != rank)).sum())
    new = [torch.randn(
        s.batch * s.nodes, HEADS, DIM, device=s.device, generator=s.generator
    ).bfloat16() for _ in range(2)]
    single = [pool[:1] for pool in pools]
    return [
        Op(f"kv move, {s.layers} layers", "kv_move", lambda ops, i: ops.commit_kv(
            *pools, tails[i], path
        ), pools, 2 * moving * row * s.layers, sets),
        Op("kv move, 1 layer", "kv_move", lambda ops, i: ops.commit_kv(*single, tails[i], path),
           single, 2 * moving * row, sets),
        Op("kv store, 1 layer", "kv_store", lambda ops, i: ops.store_kv(
            *new, pools[0][0], pools[1][0], tails[i]
        ), single, 2 * size(*new), sets),
    ]


def lists(s: Step) -> list[Op]:
    """What library backends read: index lists, masks, page tables."""
    batch, topk, steps, nodes = s.batch, s.topk, s.steps, s.nodes
    at = (s.table, s.rows, s.lens)
    keys = int(s.lens.sum()) + batch * nodes
    tails = s.ints(2**24, batch, nodes).int()
    positions = s.tree["positions_out"]
    words = s.tree["words_out"]
    indptr = torch.zeros(batch + 1, dtype=torch.int32, device=s.device)
    indptr[1:] = (s.lens + nodes).cumsum(0)
    mask_indptr = torch.zeros_like(indptr)
    mask_indptr[1:] = ((s.lens + nodes) * nodes + 7).div(8, rounding_mode="floor").cumsum(0)
    indices = torch.zeros(keys, dtype=torch.int32, device=s.device)
    masks = torch.zeros(int(mask_indptr[-1]), dtype=torch.uint8, device=s.device)
    pages, lens = s.empty(batch, s.table.shape[1] + nodes).int(), s.empty(batch).int()
    blocks = s.empty(batch, -(-(s.table.shape[1] + nodes) // 64)).int()
    ancestors, counts = s.empty(batch * nodes, nodes).int(), s.empty(batch * nodes).int()
    found = [
        Op("index lists", "csr", lambda ops, _: ops.fill_lists(
            *at, positions, tails, indptr, indices, -1
        ), [indices], 8 * keys),
        Op("packed masks", "csr", lambda ops, _: ops.pack_masks(
            indptr, mask_indptr, s.lens, positions, positions, words, masks, -1
        ), [masks], masks.nbytes + words.nbytes),
        Op("page table", "page_table", lambda ops, _: ops.fill_page_table(
            *at, tails, pages, lens, q_len=nodes
        ), [pages, lens], 8 * keys),
        Op("ancestor table", "page_table", lambda ops, _: ops.fill_ancestor_table(
            tails, words, ancestors, counts
        ), [ancestors, counts], size(tails, words, ancestors)),
        Op("block table, pages of 64", "block_table", lambda ops, _: ops.fill_block_table(
            *at, tails, blocks, lens, page_size=64
        ), [blocks, lens], keys // 64 * 4 + blocks.nbytes),
    ]
    if steps > 1 and batch <= 64:
        found += draft_lists(s, topk, steps)
    return found


def draft_lists(s: Step, topk: int, steps: int) -> list[Op]:
    branches = s.ints(2**24, s.batch, steps, topk).int()
    words = torch.zeros(s.batch, steps, topk, -(-steps * topk // 64), dtype=torch.int64)
    for step in range(steps):
        for branch in range(topk):
            for above in range(step + 1):
                node = above * topk + branch
                bit = 1 << node % 64
                words[:, step, branch, node // 64] |= bit - 2**64 if bit >> 63 else bit
    words = words.to(s.device)
    indptr = torch.zeros(steps, s.batch * topk + 1, dtype=torch.int32, device=s.device)
    width = s.batch * topk * (s.table.shape[1] + steps)
    indices = torch.zeros(steps, width, dtype=torch.int32, device=s.device)
    keys = steps * topk * int(s.lens.sum())
    arguments = (s.lens, branches, words, indptr, indices)
    return [
        Op("draft lists", "draft_kv", lambda ops, _: ops.fill_draft_kv(
            s.table, s.rows, *arguments
        ), [indptr, indices], 4 * keys + 4 * keys // (steps * topk)),
        # on the lists that this has just filled
        Op("draft tails", "draft_kv", lambda ops, _: ops.fill_draft_tails(steps - 1, *arguments),
           [indices], 8 * s.batch * topk * steps),
    ]


def ends(s: Step) -> list[Op]:
    """The begin and the end of a step over state tables, and the features of the accepted path."""
    batch, topk, steps, device = s.batch, s.topk, s.steps, s.device
    reserve, depth = max(s.nodes, topk * (steps - 1)), steps + 1
    # bonus token, top tokens and their probabilities, hidden state, how the request draws
    kinds = [((), torch.int64), ((topk,), torch.int64), ((topk,), torch.float32),
             ((HIDDEN,), torch.bfloat16), ((), torch.float32), ((), torch.int32),
             ((), torch.float32), ((), torch.int64)]
    tables = [s.ints(100, batch + 1, *shape).to(dtype) for shape, dtype in kinds]
    outs = [s.empty(batch, *shape).to(dtype) for shape, dtype in kinds]
    lens = torch.cat([s.lens[:1] * 0, s.lens])
    slots = s.ints(2**24, batch + 1, s.table.shape[1]).int()
    begun = {
        "rows_out": s.empty(batch), "seq_lens_out": s.empty(batch).int(),
        "window_out": s.empty(batch, reserve).int(), "positions_out": s.empty(batch, depth),
        "draft_positions_out": s.empty(batch, steps - 1, topk),
    }
    rows, reserved, tokens = s.rows + 1, lens + reserve, s.ints(s.vocab, batch, depth)
    after, packed = lens.clone(), s.empty(batch, 1 + depth)
    new = [s.ints(100, *out.shape).to(out.dtype) for out in outs[:4]]
    features = torch.randn(batch, s.nodes, 3 * HIDDEN, device=device, generator=s.generator)
    features = features.bfloat16()
    path = s.ints(s.nodes, batch, depth).int()
    kept = s.ints(depth + 1, batch, low=1).int()
    gathered = {
        "features_out": torch.zeros(batch, depth, 3 * HIDDEN, dtype=torch.bfloat16, device=device),
        "last_rows_out": s.empty(batch), "after_out": s.empty(batch),
    }
    return [
        Op("begin step", "step", lambda ops, _: ops.begin_step(
            rows, lens, reserved, slots, reserve_len=reserve, **begun,
            tables=tables, outs=outs,
        ), [*begun.values(), *outs], 2 * size(*outs) + size(*begun.values())),
        Op("end step", "step", lambda ops, _: ops.end_step(
            rows, s.lens, kept, tokens, seq_lens_table=after, sources=new,
            tables=tables[:4], packed_out=packed,
        ), [after, packed, *tables[:4]], 2 * size(*new) + size(packed)),
        Op("path features", "step", lambda ops, _: ops.gather_path(
            features, path, kept, s.lens, **gathered
        ), list(gathered.values()), 2 * size(gathered["features_out"])),
    ]


GROUPS = (trees, beams, accepts, kv, lists, ends)


def check(op: Op) -> None:
    """Hold the kernel to its twin, bit by bit.

    Raises
    ------
    ArithmeticError
        If more than the allowed share differs.
    """
    kernels = importlib.import_module(f"specattn.kernels.{op.module}")
    twins = importlib.import_module(f"specattn.kernels.reference.{op.module}")
    before = [tensor.clone() for tensor in op.outputs]
    op.run(kernels, 0)
    found = [tensor.clone() for tensor in op.outputs]
    for tensor, value in zip(op.outputs, before, strict=True):
        tensor.copy_(value)
    op.run(twins, 0)
    for tensor, value in zip(op.outputs, found, strict=True):
        share = (tensor != value).float().mean().item()
        if share > op.differ:
            raise ArithmeticError(f"{op.name}: {share:.1%} of {list(tensor.shape)} differ")


def launches(call: Callable[[], None]) -> int:
    """Kernels, copies and fills of one call."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == cuda for event in profile.events())


def measure(
    name: str, moved: int, call: Callable[[int], None], sets: int, rounds: int, count: bool
) -> dict[str, Any]:
    """Time a stack of calls; with ``count``, count the launches of one, too."""
    single = timing.once(lambda: call(0))
    calls = max(8, min(MOST_CALLS, round(REPLAY_US / single)))

    def stack() -> None:
        for nth in range(calls):
            call(nth % sets)

    recorded = timing.record(stack, calls)
    timing.replay_in_turn([recorded], rounds, 1e9)
    return {
        "name": name, "us": round(recorded.median, 3),
        "p10_us": round(recorded.percentile(0.1), 3), "p90_us": round(recorded.percentile(0.9), 3),
        "rounds": len(recorded.times), "calls": calls, "bytes": moved,
        "launches": launches(lambda: call(0)) if count else None,
    }


def planned(s: Step, q_len: int, tail_len: int) -> TreeAttention:
    """Attention of one forward."""
    from specattn.kernels.tree_attention import TreeAttention

    return TreeAttention(
        batch=s.batch, q_len=q_len, tail_len=tail_len, num_qo_heads=4 * HEADS,
        num_kv_heads=HEADS, head_dim=DIM, v_head_dim=DIM, dtype=torch.bfloat16, device="cuda",
        sm_scale=DIM**-0.5,
    )


def plans(
    name: str, s: Step, kernels: list[TreeAttention], apart: bool, rounds: int, count: bool
) -> dict[str, Any]:
    """Attention plans, in one launch or ``apart``.

    They have no twin: the tiles they hand out must be those there are.
    """
    from specattn.kernels.tree_plan import fill_plans

    cuts = [kernel.cut(s.lens, s.rows, s.table.stride(0)) for kernel in kernels]

    def fill(_: int) -> None:
        for group in ([cut] for cut in cuts) if apart else (cuts,):
            fill_plans(group)

    fill(0)
    for kernel in kernels:
        tiles = -(-(s.lens + kernel.tail_len) // kernel.tables.block_n)
        if not torch.equal(kernel.tables.requests[:, 5], tiles.cumsum(0) - tiles):
            raise ArithmeticError(f"{name}: wrong tiles")
        if int(kernel.tables.chunks[:, 0].sum()) != int(tiles.sum()):
            raise ArithmeticError(f"{name}: chunks do not hold all tiles")
    moved = sum(
        size(kernel.tables.requests, kernel.tables.chunks, s.lens, s.rows) for kernel in kernels
    )
    return measure(name, moved, fill, 1, rounds, count)


def planning(s: Step) -> dict[str, tuple[list[TreeAttention], bool]]:
    """Verification alone; then all forwards of a step: drafts, verification, draft extend."""
    verify = planned(s, s.nodes, s.nodes)
    step = [planned(s, s.topk, s.topk * (i + 1)) for i in range(s.steps - 1)]
    step += [verify, planned(s, s.steps + 1, s.steps + 1)]
    return {
        "plan": ([verify], True), "plans of a step": (step, False),
        "plans of a step, apart": (step, True),
    }


def cell(s: Step, rounds: int, only: str, count: bool) -> dict[str, Any]:
    """Check and time everything on one batch and tree."""
    name = f"batch {s.batch}, topk {s.topk}, {s.steps} steps, {s.nodes} nodes"
    print(name, flush=True)
    found: list[dict[str, Any]] = []

    def attempt(label: str, run: Callable[[], dict[str, Any]]) -> None:
        try:
            found.append(run())
        # an operation may fail in any way, and the others still count
        except Exception as problem:
            traceback.print_exc()
            failed = f"{type(problem).__name__}: {str(problem)[:300]}"
            found.append({"name": label, "failed": failed})
        line = found[-1]
        text = line.get("failed") or (
            f"{line['us']:9.2f} us  {line['p10_us']:.2f}..{line['p90_us']:.2f}  "
            f"{line['launches'] or ''}  {line['bytes'] / line['us'] / 1e6:6.3f} TB/s"
        )
        print(f"  {label:26} {text}", flush=True)

    def timed(op: Op) -> dict[str, Any]:
        check(op)
        kernels = importlib.import_module(f"specattn.kernels.{op.module}")
        return measure(op.name, op.moved, lambda i: op.run(kernels, i), op.sets, rounds, count)

    for label, (kernels, apart) in planning(s).items():
        if only in label:
            attempt(label, lambda at=(label, s, kernels, apart): plans(*at, rounds, count))
    for group in GROUPS:
        for op in group(s):
            if only in op.name:
                attempt(op.name, lambda o=op: timed(o))
        torch.cuda.empty_cache()
    case = {
        "batch": s.batch, "topk": s.topk, "steps": s.steps, "nodes": s.nodes,
        "context": s.context, "vocab": s.vocab, "layers": s.layers,
    }
    return {"name": name, "case": case, "contestants": found}


def compare_warps(batches: list[int], rounds: int) -> None:
    """Print what one to eight warps per request take; None is the kernels' own choice."""
    from specattn.kernels import accept, tree
    from specattn.kernels.reference import accept as accept_twin
    from specattn.kernels.reference import tree as tree_twin

    for shape in TREES:
        for batch in batches:
            s = Step(batch, *shape, "cuda", layers=1)
            cases = (
                ("tree", s.build, tree, tree_twin, s.tree),
                ("accept greedy", s.follow, accept, accept_twin, s.accepted),
            )
            for name, call, kernels, twins, out in cases:
                call(twins)
                expected = {key: value.clone() for key, value in out.items()}
                line = [f"{name:14} batch {batch:3}, {shape[2]} nodes:"]
                for warps in (None, *WARPS):
                    for value in out.values():
                        value.fill_(-77)
                    run = partial(call, kernels, num_warps=warps)
                    run()
                    wrong = [key for key in out if not torch.equal(out[key], expected[key])]
                    took = measure(name, 0, lambda _, run=run: run(), 1, rounds, False)
                    line.append(f"{warps} {took['us']:.2f}" + (f" WRONG {wrong}" if wrong else ""))
                print("  ".join(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", help="default: 1,16,64,256,512; with --warps 1,64,256")
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warps", action="store_true", help="time num_warps of tree and accept")
    parser.add_argument("--commit", help="what the results call this version")
    parser.add_argument("--out", type=Path, default=RESULTS / "small_ops_h200.json")
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batch.split(",")] if options.batch else None
    if options.warps:
        compare_warps(batches or [1, 64, 256], options.rounds)
        return
    found: dict[str, Any] = {
        "format": 1, "part": "small_ops", "title": "Small kernels",
        "machine": machine(options.commit), "rounds": options.rounds,
        "roofs": roofs.measure(options.rounds), "cells": [],
    }
    print(found["machine"]["device"], found["roofs"], flush=True)
    for tree in TREES:
        for batch in batches or BATCHES:
            torch.manual_seed(0)
            step = Step(batch, *tree, "cuda")
            # no batch has other launches than the first
            count = not found["cells"]
            found["cells"].append(cell(step, options.rounds, options.only, count))
            del step
            torch.cuda.empty_cache()
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    worst: dict[str, float] = {}
    for done in found["cells"]:
        for line in done["contestants"]:
            if line["name"] in TARGETED and done["case"]["batch"] <= 256 and "us" in line:
                worst[line["name"]] = max(worst.get(line["name"], 0.0), line["us"])
    print("slowest up to batch 256:", worst)


if __name__ == "__main__":
    main()
