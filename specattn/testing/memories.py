"""The memories' part of the conformance kit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from specattn.cache.memory import memory_for
from specattn.cache.slot_table import SlotTable
from specattn.config import SpecConfig
from specattn.speculative.model import ModelSlot
from specattn.speculative.prompts.prefill import Prefill
from specattn.speculative.prompts.prompt import Prompt
from specattn.speculative.proposers.host import HostProposer, HostTree
from specattn.speculative.sampling.params import SamplingBatch, SamplingParams
from specattn.speculative.states import RequestStates
from specattn.speculative.step.decoder import StepDecoder
from specattn.testing.kit import Check
from specattn.testing.oracle import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from specattn.batch import AcceptResult, DraftTree
    from specattn.speculative.model import TargetModel

    MakeSlot = Callable[[TargetModel, SlotTable], ModelSlot[TargetModel]]

#: A chain, beams in pages, and trees of any shape, wide and deep.
CONFIGS = (
    SpecConfig(3, 1, 4, 128, 6),
    SpecConfig(3, 2, 7, 128, 6, page_size=4),
    SpecConfig(5, 4, 17, 128, 6),
)
#: Relative error that the order of sums may cause in float32.
TOLERANCE = 2e-5
_PROMPTS = (23, 9, 1)
# who takes part in a step, and which part of the deepest path each keeps, None for any
_STEPS: tuple[tuple[tuple[int, ...], float | None], ...] = (
    ((0, 1, 2), 0.0),
    ((2, 0, 1), 1.0),
    ((1,), None),
    ((2, 1), None),
    ((0, 2, 1), None),
    ((0,), 1.0),
    ((1, 2, 0), None),
)


def memory_conformance(
    target: TargetModel,
    slot: MakeSlot | None = None,
    *,
    configs: Sequence[SpecConfig] = CONFIGS,
    backend: str = "torch_native",
) -> Iterator[Check]:
    """Yield a check per rule and config.

    Parameters
    ----------
    target : TargetModel
        A target in float32.
    slot : callable, optional
        Gives the target its memory, over a table's rows and slots; by default what `memory_for`
        makes.
    configs : sequence of SpecConfig
        The trees, each with room for six requests and contexts of 128 tokens.
    backend : str
        The attention, without ``slot``.
    """

    def usual(model: TargetModel, table: SlotTable) -> ModelSlot[TargetModel]:
        return ModelSlot.of(model, memory_for(model.layers, table), backend)

    rules = {
        "pieces": ("prompts in pieces", _pieces),
        "plain": ("plain decoding", _plain),
        "paths": ("kept paths", _paths),
    }
    name = type(target).__name__
    for config in configs:
        shape = f"{config.num_steps}x{config.topk}x{config.num_draft_tokens}"
        for rule, (broken, body) in rules.items():
            run = partial(_run, body, target, slot or usual, config)
            yield Check(f"{rule}-{shape}", broken, name, run, role="memory of")


@torch.no_grad()
def _run(
    body: Callable[[_World], None], target: TargetModel, slot: MakeSlot, config: SpecConfig
) -> None:
    world = _World.of(target, slot, config)
    # the second time, rows were those of other requests
    for _ in range(2):
        body(world)
        rows = sorted(world.table.rows)
        for at in torch.randperm(len(rows)).tolist():
            world.table.free(rows[at])


def _pieces(world: _World) -> None:
    """Prompts whole, in chunks with others, and in two runs."""
    texts = [world.text(count + 1) for count in _PROMPTS]
    want = [world.prompts([text])[0] for text in texts]
    for row, other, text in zip(want, world.prompts(texts, chunk=12), texts, strict=True):
        world.compare(other, row, text, "whose prompt came in chunks of 12")
        world.table.free(other)
    for row, text in zip(want[:2], texts, strict=False):
        known = len(text) // 2
        (other,) = world.prompts([text[: known + 1]])
        world.prompts([text], [other], cached=known)
        world.compare(other, row, text, "whose prompt came in two runs")


def _plain(world: _World) -> None:
    """Texts by plain steps, and the same texts as prompts."""
    texts = [world.text(count + 1) for count in _PROMPTS]
    rows = world.prompts(texts)
    more = [world.text(count) for count in (1, 5, 3)]
    world.decode(rows, texts, more)
    for row, text in zip(rows, texts, strict=True):
        (want,) = world.prompts([text])
        world.compare(row, want, text, "after plain decoding")


def _paths(world: _World) -> None:
    """Texts by paths of trees, and the same texts by plain decoding."""
    texts = [world.text(count + 1) for count in _PROMPTS]
    rows, plain = world.prompts(texts), world.prompts(texts)
    same = [[*text] for text in texts]
    for who, part in _STEPS:
        trees = [world.tree(part) for _ in who]
        kept = [
            [*(tree.tokens[node - 1] for node in path[1:]), *world.text(1)] for tree, path in trees
        ]
        world.step(
            world.decoder,
            [rows[at] for at in who],
            [texts[at] for at in who],
            [path for _, path in trees],
            kept,
            trees=[tree for tree, _ in trees],
        )
        world.decode([plain[at] for at in who], [same[at] for at in who], kept)
        for at in who:
            world.compare(rows[at], plain[at], texts[at], "after a step of trees")


class _Given(HostProposer):
    """Proposes nothing by itself: checks give trees to the decoder."""

    def draft(self, requests: object, config: object) -> Sequence[HostTree]:
        raise NotImplementedError("the checks of memories give trees")


class _Kept:
    """An acceptor that keeps the paths which it was told.

    Parameters
    ----------
    batch, depth : int
        Requests, and nodes of a path.
    device : torch.device
        Where steps run.
    """

    def __init__(self, batch: int, depth: int, device: torch.device) -> None:
        self._index = torch.zeros(batch, depth, dtype=torch.int32, device=device)
        self._bonus = torch.zeros(batch, dtype=torch.int64, device=device)

    def tell(self, paths: Sequence[Sequence[int]], bonus: Sequence[int]) -> None:
        """Keep these nodes, then these tokens; of padding its root."""
        self._index.fill_(-1)
        self._index[:, 0] = 0
        for at, path in enumerate(paths):
            self._index[at, : len(path)] = torch.tensor(path, dtype=torch.int32)
        self._bonus[: len(bonus)] = torch.tensor(bonus)

    def __call__(
        self,
        tree: DraftTree,
        logits: Tensor,
        seq_lens: Tensor,
        config: SpecConfig,
        sampling: SamplingBatch,
        out: AcceptResult,
    ) -> AcceptResult:
        """Write the paths to the step's buffers."""
        batch, depth = out.accept_index.shape
        index, bonus = self._index[:batch, :depth], self._bonus[:batch]
        lens = (index >= 0).sum(1)
        nodes = torch.nn.functional.pad(index[:, 1:], (0, 1), value=-1).long()
        after = torch.where(nodes < 0, 0, tree.tokens.gather(1, nodes.clamp(min=0)))
        out.accept_index.copy_(index)
        out.accept_tokens.copy_(after.scatter(1, lens[:, None] - 1, bonus[:, None]))
        out.accept_lens.copy_(lens)
        out.bonus_tokens.copy_(bonus)
        return out


@dataclass(frozen=True)
class _World:
    """Requests whose texts the checks decide, over one memory."""

    slot: ModelSlot[TargetModel]
    table: SlotTable
    states: RequestStates
    kept: _Kept
    config: SpecConfig
    decoder: StepDecoder
    plain: StepDecoder

    @classmethod
    def of(cls, target: TargetModel, make: MakeSlot, config: SpecConfig) -> _World:
        """Return a world without requests."""
        batch, device = config.max_num_reqs, target.device
        slots = (config.max_context_len // config.page_size * batch + 1) * config.page_size
        table = SlotTable(**config.sizes, num_slots=slots, device=device)
        slot, states = make(target, table), RequestStates.alloc(batch + 1, {}, device)
        kept = _Kept(batch, config.num_steps + 1, device)
        decoder, plain = (
            StepDecoder(slot, draft, one, table, states, buckets=[batch], accept=kept)
            for draft, one in ((_Given(), config), (None, config.plain()))
        )
        return cls(slot, table, states, kept, config, decoder, plain)

    def text(self, count: int) -> list[int]:
        """Return random tokens."""
        tokens: list[int] = torch.randint(1, self.slot.model.vocab_size, (count,)).tolist()
        return tokens

    def tree(self, part: float | None) -> tuple[HostTree, list[int]]:
        """Draw a tree and a path from its root.

        The path is any, or this part of a tree's depth.
        """
        config, depths, parents = self.config, [0], [-1]
        chain = config.topk == 1 and config.tree == "beam"
        most = config.num_draft_tokens - 1
        for node in range(1, 1 + (_any(most + 1) if part is None else most)):
            open_nodes = [at for at, depth in enumerate(depths) if depth < config.num_steps]
            # the first ones go down, so that a path may be as long as a tree is deep
            deep = chain or (part is not None and node <= config.num_steps)
            parents.append(node - 1 if deep else open_nodes[_any(len(open_nodes))])
            depths.append(depths[parents[-1]] + 1)
        ends = _any(len(parents)) if part is None else int(part * config.num_steps)
        path = [ends]
        while path[0]:
            path.insert(0, parents[path[0]])
        return HostTree(self.text(len(parents) - 1), [one - 1 for one in parents[1:]]), path

    def prompts(
        self,
        texts: Sequence[Sequence[int]],
        rows: Sequence[int] = (),
        *,
        cached: int = 0,
        chunk: int = 4096,
    ) -> list[int]:
        """Run texts but for their last tokens, which follow the prompts.

        Their rows are new, or ``rows``.
        """
        rows = [*rows] or [self.table.allocate() for _ in texts]
        lens, device = [len(text) - 1 for text in texts], self.table.req_to_token.device
        self.table.reserve(rows, lens)
        sampling = SamplingBatch.of([SamplingParams(seed=0)] * len(rows), device)
        prompts = [Prompt(row, text[:-1], cached) for row, text in zip(rows, texts, strict=True)]
        out = Prefill(self.slot, _Given(), self.table, self.config, chunk).run(prompts, sampling)
        committed = torch.tensor(lens, dtype=torch.int32, device=device)
        bonus = torch.tensor([text[-1] for text in texts], device=device)
        where = torch.tensor(rows, device=device)
        self.states.admit(where, committed, bonus, out.state, sampling)
        for row, length in zip(rows, lens, strict=True):
            self.table.commit(row, length)
        return rows

    def step(
        self,
        decoder: StepDecoder,
        rows: Sequence[int],
        texts: Sequence[list[int]],
        paths: Sequence[Sequence[int]],
        kept: Sequence[Sequence[int]],
        *,
        trees: Sequence[HostTree] | None = None,
    ) -> None:
        """Run a step that keeps these paths, and append what it gains."""
        room, lens = self.config.reserve_len, [len(text) - 1 for text in texts]
        self.table.reserve(rows, [length + room for length in lens])
        self.kept.tell(paths, [tokens[-1] for tokens in kept])
        known = torch.tensor(lens, dtype=torch.int32)
        gained = decoder.step(rows, seq_lens_cpu=known, trees=trees)
        require(gained == [*kept], f"a step gains {gained}, the paths have {[*kept]}")
        for row, text, tokens in zip(rows, texts, kept, strict=True):
            text += tokens
            self.table.commit(row, len(text) - 1)

    def decode(
        self,
        rows: Sequence[int],
        texts: Sequence[list[int]],
        more: Sequence[Sequence[int]],
    ) -> None:
        """Let plain decoding append tokens, each request its own number."""
        for at in range(max(map(len, more))):
            some = [place for place, tokens in enumerate(more) if len(tokens) > at]
            named = [rows[place] for place in some], [texts[place] for place in some]
            self.step(self.plain, *named, [[0] for _ in some], [[more[p][at]] for p in some])

    def compare(self, row: int, want: int, text: Sequence[int], who: str) -> None:
        """Hold a row's request to another row's of the same text."""
        found, other = (self._held(one, len(text) - 1) for one in (row, want))
        for name, tensor in other.items():
            error = (found[name] - tensor).norm()
            same = bool(error <= TOLERANCE * tensor.norm())
            require(same, f"{name} of a request of {len(text)} tokens, {who}, differs")

    def _held(self, row: int, length: int) -> dict[str, Tensor]:
        """Return what the memory holds of a request, in float64."""
        by_row, slots = self.slot.by_row(), self.table.req_to_token[row, :length].long()
        return {
            name: by_row[name][:, row].double()
            if name in by_row
            else torch.stack([layer[slots].double() for layer in layers])
            for name, layers in self.slot.tensors().items()
        }


def _any(count: int) -> int:
    """Return a random number below ``count``."""
    return int(torch.randint(count, ()))
