"""Decoders over poisoned pools, and random inputs of every captured mode."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specattn.batch import DraftTree, ForwardMode
from specattn.config import SpecConfig
from specattn.speculative.step.decoder import StepDecoder
from specattn.speculative.step.level import StepPart
from specattn.speculative.step.setup import StepSetup
from specattn.speculative.step.verify import accept
from tests.tiny import TinyDraft, TinyTarget

if TYPE_CHECKING:
    from specattn.buffers import BufferSet
    from specattn.cache.kv_pool import KVPool
    from specattn.cache.slot_table import SlotTable
    from specattn.speculative.states import RequestStates
    from specattn.speculative.step.launch import StepLaunch
    from specattn.speculative.step.step import Step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = ["torch_native", "triton"] if DEVICE.type == "cuda" else ["torch_native"]
_DRAFT_STATE = {"topk_probs", "topk_tokens", "hidden_states", "draft_probs"}
MODES = [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_DECODE, ForwardMode.DRAFT_EXTEND]
CONFIG = SpecConfig(4, 3, 9, max_context_len=256, max_num_reqs=8, page_size=4)


def part_of(mode: ForwardMode) -> StepPart:
    """The part of a greedy step that runs a mode."""
    return StepPart(mode)


def place_of(tree: DraftTree) -> tuple[int, int]:
    """Where a step's tree is: buckets share memory, halves do not."""
    return tree.tokens.data_ptr(), len(tree.tokens)


@dataclass
class World:
    """A piecewise decoder over pools whose unreserved slots hold NaN."""

    decoder: StepDecoder
    table: SlotTable
    pools: tuple[KVPool, KVPool]
    rows: list[int]
    # a copy of what the target gave last, by `place_of` its tree
    logits: dict[tuple[int, int], torch.Tensor]

    def poison(self, lens: list[int]) -> None:
        """Random KV in the committed prefixes of ``lens``, NaN everywhere else."""
        generator = torch.Generator().manual_seed(sum(lens))
        for pool in self.pools:
            for data in (pool.k, pool.v):
                data.fill_(float("nan"))
                for row, length in zip(self.rows, lens, strict=False):
                    slots = self.table.req_to_token[row, :length].long()
                    shape = (len(data), length, *data.shape[2:])
                    data[:, slots] = torch.randn(shape, generator=generator).to(data)

    @torch.no_grad()
    def run(
        self, mode: ForwardMode, lens: list[int], values: dict, *, eager=False, on_host=True
    ) -> dict:
        """Run one part of a step over given inputs, and return what it leaves."""
        decoder, part, size = self.decoder, part_of(mode), len(lens)
        (captured,) = decoder.runner.ready((part,), size)
        self.begin(captured, lens, values)
        captured.schedule(torch.tensor(lens, dtype=torch.int32) if on_host else None)
        if eager:
            captured.program.run()
        else:
            decoder.runner.replay(part, captured)
        found = self.left(mode, captured.program, size)
        if mode is ForwardMode.DRAFT_EXTEND:
            decoder._in_flight.launched(size, tuple(self.rows[:size])).wait()
        return {name: value.clone() for name, value in found.items()}

    def begin(self, captured, lens: list[int], values: dict) -> None:
        """Put a part's inputs where the phases before it would have left them."""
        decoder, size = self.decoder, len(lens)
        rows, states = self.rows[:size], decoder.states
        states.seq_lens[rows] = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
        states.bonus_tokens[rows] = 0
        for name in _DRAFT_STATE & values.keys():
            states.drafting[name][rows] = values[name].to(states.drafting[name].dtype)
        decoder._in_flight.write_rows(rows, captured.bucket)
        for step, which in captured.program.by_step():
            mine = {name: value[which] for name, value in values.items()}
            self.begin_half(step, mine)

    def begin_half(self, step: Step, values: dict) -> None:
        """Put in a step's inputs; one of two halves may have padding alone."""
        step.begin()
        written = {n: v for n, v in values.items() if n not in _DRAFT_STATE}
        size = max((len(value) for value in written.values()), default=0)
        if "words" in values:
            step.draft()
        if "accept_lens" in values:
            width, counts = values["tokens"].shape[1], values["accept_lens"].long()
            ends = torch.arange(len(step.packed), device=DEVICE) * width
            # padding accepts its root alone
            for name in ("accept_tokens", "features", "bonus_tokens"):
                getattr(step.buffers, name).zero_()
            step.buffers.accept_lens.fill_(1)
            step.buffers.after.fill_(1)
            step.buffers.last_rows.copy_(ends)
            written["accept_tokens"] = written.pop("tokens")
            written["last_rows"] = ends[:size] + counts - 1
            written["after"] = step.buffers.seq_lens[:size] + counts
            written["bonus_tokens"] = written["accept_tokens"].gather(1, counts[:, None] - 1)[:, 0]
        for name, value in written.items():
            buffer = getattr(step.buffers, name)
            buffer[:size] = value.to(buffer.dtype)

    def left(self, mode: ForwardMode, launch: StepLaunch, size: int) -> dict[str, torch.Tensor]:
        """What a part leaves for its requests."""
        if mode is ForwardMode.TARGET_VERIFY:
            # what is accepted of it follows the draft's links, which are not given
            kept = [self.logits[place_of(step.tree)] for step in launch.steps]
            return {"logits": torch.cat(kept)[:size]}
        if mode is ForwardMode.DRAFT_DECODE:
            trees = [vars(step.tree) for step in launch.steps]
            return {name: torch.cat([tree[name] for tree in trees])[:size] for name in trees[0]}
        states, rows = self.decoder.states, self.rows[:size]
        return {name: states.tensors()[name][rows] for name in (*_DRAFT_STATE, "seq_lens")}

    def steps(self, mode: ForwardMode, bucket: int) -> tuple[Step, ...]:
        """What was captured for a bucket: two halves with ``tbo``."""
        return self.decoder.runner._captured[part_of(mode)][bucket].program.steps

    def step(self, mode: ForwardMode, bucket: int) -> Step:
        """What was captured for a bucket, whole."""
        (step,) = self.steps(mode, bucket)
        return step


def world(
    backend,
    buckets: list[int],
    config: SpecConfig = CONFIG,
    *,
    indices="table",
    record=True,
    dtype=torch.float32,
    window=9,
    kv_dtype=None,
    validate="off",
    tbo=False,
) -> World:
    target = TinyTarget(device=DEVICE, window=window, dtype=dtype)
    draft = TinyDraft(device=DEVICE, dtype=dtype)
    kept: dict[tuple[int, int], torch.Tensor] = {}

    def keeping(tree, logits, *rest):
        # the first call runs eagerly, so that no buffer belongs to a graph
        at = place_of(tree)
        if at not in kept:
            kept[at] = torch.empty_like(logits)
        kept[at].copy_(logits)
        return accept(tree, logits, *rest)

    context, page = config.max_context_len, config.page_size
    setup = StepSetup.over(
        target,
        draft,
        config,
        # as many again as a request holds are nobody's
        num_slots=-(-context // page) * page * 9,
        backend=backend,
        kv_dtype=kv_dtype,
        indices=indices,
        record=record,
        cudagraph="piecewise",
        accept=keeping,
        validate=validate,
        tbo=tbo,
    )
    table = setup.table
    rows = [table.allocate() for _ in range(8)]
    random.Random(3).shuffle(rows)
    for length in range(7, context + 1, 50):  # interleaves the rows' pages
        table.reserve(rows, [length] * 8)
    table.reserve(rows, [context] * 8)
    pools = tuple(slot.pool for slot in setup.slots)
    return World(StepDecoder.of(setup, buckets=buckets), table, pools, rows, kept)


def inputs(mode: ForwardMode, lens: list[int], seed: int, config: SpecConfig = CONFIG) -> dict:
    """Random values of a mode: new trees, new beams, new accepted lengths."""
    rng = random.Random(seed)
    size, nodes, width = len(lens), config.num_draft_tokens, config.num_steps + 1
    torch.manual_seed(seed)
    if mode is ForwardMode.TARGET_VERIFY:
        parents = [[-1] + [rng.randrange(j) for j in range(1, nodes)] for _ in lens]
        words, depths = zip(*(tree_of(p) for p in parents), strict=True)
        found = {
            "tokens": torch.randint(61, (size, nodes)),
            "tree_positions": torch.tensor(lens)[:, None] + torch.tensor(depths),
            "words": torch.tensor(words)[:, :, None],
        }
    elif mode is ForwardMode.DRAFT_DECODE:
        found = {
            "topk_probs": torch.rand(size, config.topk).sort(1, descending=True).values,
            "topk_tokens": torch.randint(61, (size, config.topk)),
            "hidden_states": torch.randn(size, 64),
            "draft_probs": torch.empty(size, 0),
        }
    else:
        found = {
            "tokens": torch.randint(61, (size, width)),
            "accept_lens": torch.randint(1, width + 1, (size,), dtype=torch.int32),
            "features": torch.randn(size, width, 64),
        }
    return {name: value.to(DEVICE) for name, value in found.items()}


def tree_of(parents: list[int]) -> tuple[list[int], list[int]]:
    words, depths = [], []
    for node, parent in enumerate(parents):
        words.append(1 << node | (words[parent] if node else 0))
        depths.append(depths[parent] + 1 if node else 0)
    return words, depths


def same(a: dict, b: dict) -> None:
    for name in a:
        assert not a[name].isnan().any() if a[name].is_floating_point() else True
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)


def identical(a: dict, b: dict) -> None:
    for name in a:
        assert torch.equal(a[name], b[name]), name


def put(states: RequestStates, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor in place of a table of the states, by force."""
    if name in states.drafting:
        states.drafting[name] = tensor
    else:
        object.__setattr__(states, name, tensor)


def buffer_sets(step: Step) -> tuple[BufferSet, ...]:
    """Every static buffer set of a step."""
    return step.buffers, step.bound.multi_step.inputs
