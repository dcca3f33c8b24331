"""What one launch runs: a part of one or two steps."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from specattn.batch import ForwardMode, halves
from specattn.buffers import fingerprint
from specattn.cuda_graph.recorder import is_recording, side_by_side
from specattn.speculative.host_proposer import BoundHostTrees
from specattn.speculative.model import ModelSlot
from specattn.speculative.step import Step, StepPart

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from specattn.attention.multi_step import Indices
    from specattn.buffers import BufferSet, Fingerprint
    from specattn.cache.slot_table import RequestTable
    from specattn.config import SpecConfig
    from specattn.speculative.host_buffers import HostBuffers
    from specattn.speculative.host_proposer import HostTree
    from specattn.speculative.logprobs import LogprobBuffers
    from specattn.speculative.model import TargetModel
    from specattn.speculative.processors import ProcessorStates
    from specattn.speculative.proposer import Proposer
    from specattn.speculative.states import RequestStates
    from specattn.speculative.step import Acceptor


@dataclass(frozen=True)
class StepLaunch:
    """A part of a step, for a batch or its two halves.

    ``steps`` is one; or, for two-batch overlap (``tbo``), one per half that has requests (see
    `halves`), which write views of ``packed``, ``[B, N + 2]`` int64: what the host is told.
    """

    part: StepPart
    steps: tuple[Step, ...]
    host: HostBuffers
    packed: Tensor
    tbo: bool = False

    @classmethod
    def alloc(
        cls,
        target: ModelSlot[TargetModel],
        proposer: Proposer,
        config: SpecConfig,
        table: RequestTable,
        states: RequestStates,
        host: HostBuffers,
        batch: int,
        *,
        indices: Indices,
        acceptor: Acceptor,
        tbo: bool = False,
    ) -> StepLaunch:
        """Allocate the buffers of a whole step for ``batch`` requests.

        The halves of two-batch overlap share what both only read, and tables of which they write
        different rows: models, pools, ``req_to_token`` and the states.
        """
        device = table.req_to_token.device
        packed = torch.zeros(batch, config.num_steps + 2, dtype=torch.int64, device=device)
        steps: list[Step] = []
        for rows in _split(batch, tbo):
            if steps:
                target = target.with_own_workspace()
                proposer = proposer.with_slots(ModelSlot.with_own_workspace)
            own = host.of(rows.start, rows.stop), packed[rows]
            steps.append(
                Step.alloc(
                    target,
                    proposer,
                    config,
                    table,
                    states,
                    *own,
                    indices=indices,
                    acceptor=acceptor,
                )
            )
        return cls(StepPart(), tuple(steps), host.of(0, batch), packed, tbo)

    def first(self, batch: int) -> StepLaunch:
        """Return the launch of fewer requests, over the same buffers."""
        host, packed = self.host.of(0, batch), self.packed[:batch]
        split = _split(batch, self.tbo)
        steps = tuple(
            step.first(rows.stop - rows.start, host.of(rows.start, rows.stop), packed[rows])
            # a batch of one request is a second half
            for step, rows in zip(self.steps[-len(split) :], split, strict=True)
        )
        return StepLaunch(self.part, steps, host, packed, self.tbo)

    def processing(
        self, processors: ProcessorStates, bitmask: Tensor | None, logprobs: LogprobBuffers
    ) -> StepLaunch:
        """Return the launch for requests with processors, over the same buffers.

        ``bitmask`` and ``logprobs`` have at least a row per request.
        """
        split = _split(len(self.packed), self.tbo)
        steps = tuple(
            step.processing(
                processors, None if bitmask is None else bitmask[rows], logprobs.of(rows)
            )
            for step, rows in zip(self.steps, split, strict=True)
        )
        return replace(self, steps=steps)

    @property
    def graphs(self) -> bool:
        """Whether the attention of the part may be recorded."""
        return all(one.graphs for step in self.steps for one in step.attention(self.part.mode))

    def pad(self) -> None:
        """Turn all requests into padding."""
        for step in self.steps:
            step.pad()

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Plan the part's attention on the host, half by half."""
        begin = 0
        for step in self.steps:
            end = begin + len(step.packed)
            step.schedule(self.part.mode, None if seq_lens_cpu is None else seq_lens_cpu[begin:end])
            begin = end

    def write_trees(self, trees: Sequence[HostTree]) -> None:
        """Bring trees of the host to the device, half by half."""
        begin = 0
        for step in self.steps:
            end = begin + len(step.packed)
            assert isinstance(step.bound, BoundHostTrees)
            step.bound.write(trees[begin:end])
            begin = end

    def run(self) -> None:
        """Run the part; a recording has halves side by side."""
        first, *others = runs = [partial(step.run, self.part) for step in self.steps]
        if is_recording(self.packed.device):
            side_by_side(self.packed.device, *runs)
        elif not others:
            first()
        else:
            (second,) = others
            with _all_or_none(self._states()):
                first()
                second()
        if self.part.has(ForwardMode.DRAFT_EXTEND):
            self.host.write_output(self.packed)

    def holders(self) -> tuple[Iterable[Tensor], ...]:
        """Return what holds the tensors of states, table and pools."""
        step = self.steps[0]
        pools = [slot.pool for slot in (step.target, step.proposer.slot) if slot is not None]
        return (
            *(_Live(states) for states in self._states()),
            (step.table.req_to_token, step.table.reserved),
            *(_tensors(cache) for pool in pools for cache in (pool.k, pool.v)),
        )

    def _states(self) -> tuple[BufferSet, ...]:
        """Return what steps leave for each other."""
        step = self.steps[0]
        return (step.states, *((step.processors,) if step.processors is not None else ()))

    def fingerprint(self) -> Fingerprint:
        """Describe the buffers, tables, states, pools and configs of the step."""
        host = {f"host.{name}": tensor for name, tensor in vars(self.host).items()}
        found = fingerprint(part=self.part, packed=self.packed, **host)
        for step in self.steps:
            found += fingerprint(
                config=step.config,
                req_to_token=step.table.req_to_token,
                reserved=step.table.reserved,
                states=step.states,
                buffers=step.buffers,
            )
            if step.processors is not None:
                found += fingerprint(processors=step.processors, bitmask=step.bitmask)
            if step.logprobs is not None:
                found += fingerprint(values=step.logprobs.values, ids=step.logprobs.ids)
            found += step.bound.fingerprint()
            for attention in step.attention(None):
                found += attention.fingerprint()
        return found


@dataclass(frozen=True)
class _Live:
    """The tensors of a set, whichever it holds when it is asked."""

    states: BufferSet

    def __iter__(self) -> Iterator[Tensor]:
        for value in vars(self.states).values():
            if isinstance(value, dict):
                yield from value.values()
            elif isinstance(value, torch.Tensor):
                yield value


def _tensors(caches: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the caches of all layers as a tuple of tensors."""
    return (caches,) if isinstance(caches, torch.Tensor) else caches


@contextmanager
def _all_or_none(states: Sequence[BufferSet]) -> Iterator[None]:
    """Put the states back if anything fails."""
    tensors = [tensor for one in states for tensor in one.tensors().values()]
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    except Exception:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
        raise


def _split(batch: int, tbo: bool) -> list[slice]:
    """Return the requests of each step: all, or each half's."""
    parts = halves(batch) if tbo else (slice(0, batch),)
    return [part for part in parts if part.stop > part.start]
