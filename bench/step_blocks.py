"""Steps that draft a block in one forward, beside EAGLE-3 and plain decoding, in turn.

`bench.step --dflash` runs it: a DFlash head of five layers and best-first trees over its block.
Before anything is timed, every setting's logits are compared with float64, and every step is
checked to gain what is forced, as one graph.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from bench.random_models import random_dflash
from bench.step_oracle import check
from bench.step_timing import Stepper, between, check_advance, mark, timed
from bench.step_world import PLAIN, SHARPER, Setting, World, cached_bytes, matrix_bytes
from bench.suite.timing import record
from specattn.batch import DraftTree, Marginals
from specattn.cache.kv_pool import KVPool
from specattn.config import SpecConfig
from specattn.kernels.tree import best_first_tree
from specattn.models.hf import FeatureSpec
from specattn.plan import mask_words
from specattn.speculative.block import BlockShape, BlockView
from specattn.speculative.model import ModelSlot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from transformers import LlamaConfig, Qwen3Config

    from bench.step_forced import Forced
    from bench.step_world import Shape
    from specattn.speculative.model import TargetModel
    from specattn.speculative.step_decoder import StepDecoder

BLOCK, LAYERS, FEATURES = 16, 5, 5
# the block's depth of drafts, and nodes with the root
NODES = (16, 32, 64, 128)
#: Batch and context. What is held to its bytes comes first: a run may be cut short.
PLACES = ((1, 4096), (1, 32768), (4, 4096), (16, 4096))
# slots after the longest context, for trees of 128 nodes
ROOM = 144
# how often all settings are timed in turn, and launches of a graph of nothing but trees
TURNS, TREES = 3, 32


@dataclass(frozen=True)
class BlockSetting(Setting):
    """A best-first tree over a block: depth, nodes with the root, and tokens of every place."""

    ranks: int = 8

    @property
    def name(self) -> str:
        return f"DFlash {self.steps}-{self.nodes}"

    def config(self, longest: int, reqs: int) -> SpecConfig:
        shape = self.steps, self.topk, self.nodes, longest, reqs
        return SpecConfig(*shape, tree="best_first", ranks=self.ranks)


SETTINGS: tuple[Setting, ...] = (
    PLAIN,
    Setting(1, 3, 4),
    Setting(4, 5, 16),
    Setting(8, 7, 64),
    *(BlockSetting(1, BLOCK - 1, nodes) for nodes in NODES),
)


def draft_config(like: LlamaConfig, layers: int = LAYERS) -> Qwen3Config:
    """Return a DFlash head's configuration, of an EAGLE-3 head's widths."""
    from transformers import Qwen3Config

    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("vocab_size", "intermediate_size", "max_position_embeddings")
    return Qwen3Config(**{name: getattr(like, name) for name in names}, num_hidden_layers=layers)


class BlockWorld(World):
    """A world with a DFlash head, too, over the same target and rows.

    Parameters
    ----------
    shape, rooms, device, dtype, backend
        As of `World`.
    size, layers : int
        Tokens of a block, and layers of the head.
    states : int
        How many of the target's hidden states the head reads, evenly spaced.
    """

    def __init__(
        self,
        shape: Shape,
        rooms: Sequence[int],
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        backend: str = "triton",
        *,
        size: int = BLOCK,
        layers: int = LAYERS,
        states: int = FEATURES,
    ) -> None:
        super().__init__(shape, rooms, device, dtype, backend, ROOM)
        depth = len(self.model.layers)
        # the head knows the target's whole vocabulary; a token of logit 0 is never among its best
        self.lowest = self.model.vocab_size - 1
        self.model.lm_head.weight[self.lowest].zero_()
        spaced = (1 + round(at * (depth - 2) / states) for at in range(1, states + 1))
        block = BlockShape(size, 1, 1, (BlockView(causal=False, anchored=True),) * layers)
        config, features = draft_config(shape.draft, layers), FeatureSpec(tuple(spaced))
        made = random_dflash(config, self.model, block, features)
        # the output matrix is the target's, so what sharpens it stands before it
        self.block = replace(made, norm=made.norm * SHARPER)
        target_pool = self.target.pool
        pool = KVPool(self.block.layers, len(target_pool.k[0]), device)
        for data in (*pool.k, *pool.v):
            data.normal_()
        self.block_target: ModelSlot[TargetModel] = ModelSlot.of(
            self.model.with_features(features), target_pool, backend
        )
        self.block_draft: ModelSlot[Any] = ModelSlot.of(self.block, pool, backend)

    def slots_of(self, setting: Setting) -> tuple[ModelSlot[TargetModel], ModelSlot[Any] | None]:
        """Return the target and the draft of a setting."""
        if isinstance(setting, BlockSetting):
            return self.block_target, self.block_draft
        return super().slots_of(setting)

    def read_bytes(self, setting: Setting, batch: int, context: int) -> dict[str, int]:
        """Return the bytes a step cannot do without; see `World.read_bytes`.

        Of a block's draft all matrices once, and after the target the ones that write its context.
        """
        if not isinstance(setting, BlockSetting):
            return super().read_bytes(setting, batch, context)
        written = self._written() * self.block.fc.element_size()
        return super().read_bytes(PLAIN, batch, context) | {
            "draft weights": matrix_bytes(self.block),
            "context weights": written,
            "draft KV": cached_bytes(self.block_draft.pool, batch * context),
        }

    def operations(self, setting: Setting, batch: int) -> int:
        """Return the floating point operations of a step; see `World.operations`."""
        if not isinstance(setting, BlockSetting):
            return super().operations(setting, batch)
        draft, path, logits = self.block, setting.steps + 1, self.block.lm_head.numel()
        layers = matrix_bytes(draft) // draft.fc.element_size() - logits
        drafted = draft.block.size * layers + setting.steps * logits
        verified = setting.nodes * super().operations(PLAIN, 1)
        return batch * (verified + 2 * (drafted + path * self._written()))

    def _written(self) -> int:
        """Return the numbers of the matrices that write the draft's context."""
        draft, kv = self.block, 0
        for block in draft.blocks:
            shape = block.geometry
            kv += block.qkv[shape.num_qo_heads * shape.head_dim :].numel()
        return draft.fc.numel() + kv


def tree_us(setting: BlockSetting, batch: int, device: torch.device, rounds: int) -> float:
    """Return microseconds of a launch that builds a batch's trees, alone in a graph."""
    depth, ranks, nodes = setting.steps, setting.ranks, setting.nodes
    laws = torch.randn(batch, depth, 512, device=device).mul_(3).log_softmax(-1)
    log_probs, tokens = laws.topk(ranks, dim=-1)
    ids = torch.zeros(5, batch, nodes, dtype=torch.int64, device=device)
    words = torch.zeros(batch, nodes, mask_words(nodes), dtype=torch.int64, device=device)
    tree = DraftTree(ids[0], ids[1], words, ids[2], ids[3], ids[4], log_probs[:, :0])
    lens = torch.full((batch,), 9, dtype=torch.int32, device=device)
    marginals = Marginals(log_probs, tokens, tree.draft_probs)

    def build() -> None:
        best_first_tree(marginals, tokens[:, 0, 0], lens, out=tree)

    return _alone(build, device, rounds)


def _alone(call: Callable[[], None], device: torch.device, rounds: int) -> float:
    count, run = 1, call
    if device.type == "cuda":
        count = TREES
        run = record(lambda: [call() for _ in range(TREES)], TREES).graph.replay
    times = []
    for _ in range(rounds):
        begin = mark(device)
        run()
        end = mark(device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(between(begin, end) / count)
    return round(statistics.median(times), 3)


def graphs_of(stepper: Stepper, steps: int = 3) -> int:
    """Return the graphs of a step.

    Raises
    ------
    AssertionError
        If a step ran eagerly, or they differ from step to step.
    """
    decoder = stepper.decoder
    stats = decoder.runner.stats
    before, eager = stats.replays.total(), stats.eager.total()
    for _ in range(steps):
        stepper.both()
    stepper.finish()
    found, left = divmod(stats.replays.total() - before, steps)
    assert stats.eager.total() == eager, stats.eager
    assert not left, stats.replays
    if stepper.lens.is_cuda:
        assert all(one.recorded for one in decoder.report()), decoder.report()
    return found


def measure(
    world: BlockWorld,
    settings: Sequence[Setting],
    places: Sequence[tuple[int, int]],
    *,
    length: int,
    rounds: int,
    copy_tb_s: float,
) -> Iterator[tuple[dict[str, Any], Stepper]]:
    """Check all settings, capture them batch by batch, and time them in turn at every place.

    A cell comes with what can step again, for a trace.
    """
    lengths = {setting: min(setting.steps + 1, length) for setting in settings}
    errors = {setting: check(world, setting, lengths[setting]) for setting in settings}
    for setting, error in errors.items():
        print(f"{setting.name}: error {error:.1e}", flush=True)
    for batch in dict.fromkeys(batch for batch, _ in places):
        made: dict[Setting, tuple[StepDecoder, Forced]] = {}
        for setting in settings:
            accept = world.forced(lengths[setting])
            made[setting] = world.decoder(setting, [batch], accept), accept
        trees = {
            setting: tree_us(setting, batch, world.device, rounds)
            for setting in settings
            if isinstance(setting, BlockSetting)
        }
        for context in (context for size, context in places if size == batch):
            steppers = {}
            for setting, (decoder, accept) in made.items():
                rows = world.admit(decoder, batch, context)
                steppers[setting] = stepper = Stepper(decoder, rows, accept)
                stepper.force(lengths[setting])
                check_advance(stepper)
            us = _in_turn(steppers, rounds)
            for setting, stepper in steppers.items():
                read = world.read_bytes(setting, batch, context)
                cell = {
                    "setting": setting.name,
                    "topk": setting.topk,
                    "steps": setting.steps,
                    "nodes": setting.nodes,
                    "batch": batch,
                    "context": context,
                    "length": lengths[setting],
                    "error": round(errors[setting], 5),
                    "us": round(statistics.median(us[setting]), 2),
                    "turns_us": us[setting],
                    "bytes": read,
                    "operations": world.operations(setting, batch),
                    "floor_us": round(sum(read.values()) / copy_tb_s / 1e6, 2),
                    "graphs": graphs_of(stepper),
                    "tree_us": trees.get(setting),
                }
                stepper.check()
                cell["short"] = sum(stepper.short)
                _print(cell)
                yield cell, stepper


def _in_turn(steppers: dict[Setting, Stepper], rounds: int) -> dict[Setting, list[float]]:
    found: dict[Setting, list[float]] = {setting: [] for setting in steppers}
    for _ in range(TURNS):
        for setting, stepper in steppers.items():
            found[setting].append(timed(stepper, rounds)["us"])
            stepper.finish()
    return found


def _print(cell: dict[str, Any]) -> None:
    us, floor, tree = cell["us"], cell["floor_us"], cell["tree_us"]
    text = (
        f"  {cell['setting']:12} {cell['batch']:3} x {cell['context']:5} {us:9.1f} us  "
        f"floor {floor:9.1f}  {us / floor:.3f}x  graphs {cell['graphs']}"
    )
    if tree is not None:
        text += f"  tree {tree:6.2f} us {tree / us:.2%}"
    print(text, flush=True)
