"""An engine whose requests the checks of proposers run by themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from specattn.errors import TreeError
from specattn.speculative.model import for_context
from specattn.speculative.prompts.prefill import Prefill
from specattn.speculative.prompts.prompt import Prompt
from specattn.speculative.prompts.runner import NewPrompt, PromptRunner
from specattn.speculative.sampling.params import SamplingBatch, SamplingParams
from specattn.speculative.step.validation import check_tree
from specattn.testing.oracle import ConformanceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from specattn.batch import AcceptResult, DraftTree
    from specattn.engine.engine import Engine
    from specattn.speculative.model import Attend, ModelSlot, TargetModel, TargetOutput
    from specattn.speculative.step.step import Step


class Follower:
    """A target that lets tokens of some texts follow each other.

    After others it goes on as its model does.

    Parameters
    ----------
    model : TargetModel
        The model.
    next_ids : Tensor, optional
        ``[V]`` int64: what follows each token, -1 for what the model says. None follow so at first.
    """

    def __init__(self, model: TargetModel, next_ids: Tensor | None = None) -> None:
        self.model = model
        if next_ids is None:
            next_ids = torch.full((model.vocab_size,), -1, device=model.device)
        self.next_ids = next_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def for_context(self, max_context_len: int) -> Follower:
        """Return the same for contexts of that length."""
        return Follower(for_context(self.model, max_context_len), self.next_ids)

    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> TargetOutput:
        """Run the model; see `TargetModel.forward`."""
        out = self.model.forward(input_ids, positions, attend, rows)
        wanted = self.next_ids[input_ids if rows is None else input_ids[rows]]  # [R]
        tokens = torch.arange(out.logits.shape[1], device=wanted.device)
        best = out.logits.amax(1, keepdim=True) + 1
        logits = torch.where(tokens == wanted[:, None], best, out.logits)
        return replace(out, logits=logits)


@dataclass(frozen=True)
class World:
    """An engine's models, table and states, without its scheduler.

    Parameters
    ----------
    engine : Engine
        With a proposer.
    next_ids : Tensor
        Those of its target, a `Follower`.
    """

    engine: Engine
    next_ids: Tensor

    def text(self, count: int) -> list[int]:
        """Return random tokens."""
        vocab = self.engine.target.model.vocab_size
        tokens: list[int] = torch.randint(1, vocab, (count,)).tolist()
        return tokens

    def repeating(self, *sizes: int) -> list[list[int]]:
        """Return a text per size, of other tokens twice and their beginning.

        So something is known about how each goes on.
        """
        vocab, texts = self.engine.target.model.vocab_size, []
        tokens = (1 + torch.randperm(vocab - 1)).tolist()
        for size in sizes:
            said, tokens = tokens[:size], tokens[size:]
            texts.append([*said, *said, *said[:2]])
        return texts

    def followed(self, *sizes: int) -> list[list[int]]:
        """Return texts as `repeating` does, which the target repeats.

        It begins the last one anew after four tokens: of what repeats it, a part is kept.
        """
        texts = self.repeating(*sizes)
        for text in texts:
            for token, after in pairwise(text):
                self.next_ids[token] = after
        self.next_ids[texts[-1][3]] = texts[-1][0]
        return texts

    def row(self) -> int:
        """Take a table row."""
        return self.engine.table.allocate()

    def prompts(
        self,
        rows: Sequence[int],
        texts: Sequence[Sequence[int]],
        *,
        cached: int = 0,
        chunk: int = 4096,
    ) -> list[int]:
        """Run prompts together and admit their rows; return their first new tokens."""
        engine, device = self.engine, self.engine.table.req_to_token.device
        lens = [len(text) for text in texts]
        engine.table.reserve(rows, [length + self.engine.proposer.read_ahead for length in lens])
        sampling = SamplingBatch.of([SamplingParams(seed=0)] * len(rows), device)
        prefill = Prefill(engine.target, engine.proposer, engine.table, engine.config, chunk)
        prompts = [Prompt(row, text, cached) for row, text in zip(rows, texts, strict=True)]
        out = prefill.run(prompts, sampling)
        where = torch.tensor(rows, device=device)
        committed = torch.tensor(lens, dtype=torch.int32, device=device)
        engine.states.admit(where, committed, out.bonus_tokens, out.state, sampling)
        for row, length in zip(rows, lens, strict=True):
            engine.table.commit(row, length)
        tokens: list[int] = out.bonus_tokens.tolist()
        return tokens

    def launched(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], *, bucket: int, cached: int = 0
    ) -> list[int] | None:
        """Run prompts as captured chunks; None if the proposer binds none."""
        engine = self.engine
        setup = engine.decoder(engine.config).setup
        runner = PromptRunner.of(setup, buckets=[bucket], chunk=bucket)
        if runner is None:
            return None
        ahead = engine.proposer.read_ahead
        engine.table.reserve(rows, [len(text) + ahead for text in texts])
        prompts = [Prompt(row, text, cached) for row, text in zip(rows, texts, strict=True)]
        firsts = runner.run([NewPrompt(one, SamplingParams(seed=0)) for one in prompts])
        for row, text in zip(rows, texts, strict=True):
            engine.table.commit(row, len(text))
        return [first.wait() for first in firsts]

    def bound(self, rows: Sequence[int], lens: Sequence[int]) -> Step:
        """Return a step over buffers of its own, which has begun."""
        self._reserve(rows, lens)
        known = torch.tensor(lens, dtype=torch.int32)
        step = self.engine.decoder(self.engine.config).phases(rows, seq_lens_cpu=known)
        step.begin()
        return step

    def begin(self, step: Step, rows: Sequence[int], lens: Sequence[int]) -> None:
        """Begin a step of rows with committed lengths, and of padding."""
        self._reserve(rows, lens)
        known = torch.zeros(len(step.packed), dtype=torch.int32)
        known[: len(rows)] = torch.tensor(lens)
        step.host.rows.zero_()
        step.host.rows[0, : len(rows)] = torch.tensor(rows)
        step.schedule(None, known)
        step.begin()

    def _reserve(self, rows: Sequence[int], lens: Sequence[int]) -> None:
        room = self.engine.config.reserve_len
        self.engine.table.reserve(rows, [length + room for length in lens])

    def tree(self, step: Step) -> DraftTree:
        """Draft the tree of a step that has begun."""
        tree, vocab = step.build_tree(step.propose()), self.engine.target.model.vocab_size
        try:
            check_tree(tree, step.buffers.seq_lens, self.engine.config, vocab)
        except (TreeError, ValueError) as error:
            raise ConformanceError("whole trees", str(error)) from error
        return tree

    def drafted(self, row: int, length: int) -> list[list[int]]:
        """Return the paths of a request's tree, drafted alone over new buffers."""
        return paths(self.tree(self.bound([row], [length])))[0]

    def kept(self, row: int, length: int) -> dict[str, Tensor]:
        """Return what the proposer keeps of a request: keys, values and states."""
        engine, found = self.engine, {}
        slots = engine.table.req_to_token[row, : length + self.engine.proposer.read_ahead].long()
        for name, cache in caches(engine.draft).items():
            found[name] = cache[slots].clone()
        for name, table in engine.states.drafting.items():
            found[name] = table[row, : length if self._is_text(table) else None].clone()
        return found

    def spoil(self, row: int, length: int) -> None:
        """Fill what lies past a request's text, and is written again."""
        engine = self.engine
        reserved = int(engine.table.reserved[row])
        slots = engine.table.req_to_token[
            row, length + self.engine.proposer.read_ahead : reserved
        ].long()
        for cache in caches(engine.draft).values():
            cache[slots] = torch.nan
        for table in engine.states.drafting.values():
            if self._is_text(table):
                # the newest token is there, and then the text once more
                past = torch.arange(table.shape[1] - length - 1, device=table.device)
                table[row, length + 1 :] = table[row, past % (length + 1)]

    def _is_text(self, table: Tensor) -> bool:
        """Whether a field, as wide as a context, holds its tokens.

        The newest, which has no slot, may be among them.
        """
        wider = table.shape[1] - self.engine.table.max_context_len
        return table.dtype in (torch.int32, torch.int64) and wider in (0, 1)


def caches(model: ModelSlot[Any] | None) -> dict[str, Tensor]:
    """Return what a model's layers keep, each by itself; nothing without one."""
    kept = {} if model is None else model.tensors()
    named = ((name, *one) for name, layers in kept.items() for one in enumerate(layers))
    return {f"{name} of layer {layer}": cache for name, layer, cache in named}


def accept(step: Step, tree: DraftTree) -> AcceptResult:
    """Run a step from the tree to the commit."""
    logits, features = step.verify(tree)
    accepted = step.accept(tree, step.process(tree, logits))
    step.commit(accepted, features)
    return accepted


def paths(tree: DraftTree) -> list[list[list[int]]]:
    """Return the paths from root to leaves of each request's tree."""
    fields = tree.tokens, tree.retrieve_next_token, tree.retrieve_next_sibling
    found = []
    for tokens, child, sibling in zip(*(field.tolist() for field in fields), strict=True):
        leaves, open_paths = [], [(0, [tokens[0]])]
        while open_paths:
            node, path = open_paths.pop()
            below = child[node]
            if below < 0:
                leaves.append(path)
            while below >= 0:
                open_paths.append((below, [*path, tokens[below]]))
                below = sibling[below]
        found.append(sorted(leaves))
    return found
