"""Launches: a part of one or two steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from specattn.batch import ForwardMode, halves
from specattn.buffers import fingerprint
from specattn.cuda_graph.recorder import is_recording, side_by_side
from specattn.kernels.step import write_output
from specattn.speculative.model import ModelSlot
from specattn.speculative.proposers.host import BoundHostTrees
from specattn.speculative.sampling.grammar import open_bitmask
from specattn.speculative.step.level import StepPart
from specattn.speculative.step.step import Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor

    from specattn.buffers import BufferSet, Fingerprint
    from specattn.speculative.proposers.host import HostTree
    from specattn.speculative.sampling.processors import ProcessorStates
    from specattn.speculative.step.host_buffers import HostBuffers, LogprobBuffers
    from specattn.speculative.step.setup import StepSetup


class StepMemory:
    """Memory of steps, which launches of up to ``batch`` requests share.

    With ``tbo`` (two-batch overlap), each half has a setup and an arena. Halves share what both
    only read, and tables of which they write different rows: models, pools, ``req_to_token`` and
    the states. The ``host`` buffers are where steps find their rows, and write what they gain.
    """

    def __init__(
        self, setup: StepSetup, host: HostBuffers, batch: int, *, tbo: bool = False
    ) -> None:
        self.setup, self.host, width = setup, host, setup.config.num_steps + 2
        self.packed = torch.zeros(batch, width, dtype=torch.int64, device=setup.device)
        setups = [setup]
        if tbo and batch > 1:
            setups.append(setup.with_slots(ModelSlot.with_own_workspace))
        self._parts: list[tuple[StepSetup, dict[str, Any]]] = [(one, {}) for one in setups]

    @cached_property
    def bitmask(self) -> Tensor:
        """The tokens that grammars allow after nodes, at first all."""
        nodes, vocab = self.setup.config.num_draft_tokens, self.setup.target.model.vocab_size
        batch, device = len(self.packed), self.packed.device
        return open_bitmask(batch, nodes, vocab=vocab, device=device)

    def launch(self, batch: int) -> StepLaunch:
        """Return the launch of so many requests; the most come first."""
        split = [slice(0, batch)]
        if len(self._parts) > 1:
            split = [half for half in halves(batch) if half.stop > half.start]
        steps = tuple(
            Step(setup, self.host.of(rows.start, rows.stop), self.packed[rows], arena)
            # a batch of one request is a second half
            for (setup, arena), rows in zip(self._parts[-len(split) :], split, strict=True)
        )
        host, packed = self.host.of(0, batch), self.packed[:batch]
        return StepLaunch(StepPart(), steps, tuple(split), self, host, packed)


@dataclass(frozen=True)
class StepLaunch:
    """A part of a step, for a batch or its two halves.

    ``steps`` is one; or, for two-batch overlap, one per half that has requests (see `halves`).
    Each has the requests of ``split``, and writes its rows of ``packed``, ``[B, N + 2]`` int64:
    what the host is told.
    """

    part: StepPart
    steps: tuple[Step, ...]
    split: tuple[slice, ...]
    memory: StepMemory
    host: HostBuffers
    packed: Tensor

    def with_processing(
        self, processors: ProcessorStates, logprobs: LogprobBuffers, *, masked: bool
    ) -> StepLaunch:
        """Return the launch for requests with processors, over the same buffers.

        Grammars are served if it is ``masked``.
        """
        steps = []
        for step, which in self.by_step():
            bitmask = self.memory.bitmask[which] if masked else None
            steps.append(step.with_processing(processors, logprobs.of(which), bitmask))
        return replace(self, steps=tuple(steps))

    def by_step(self) -> Iterator[tuple[Step, slice]]:
        """Iterate over the steps, each with its requests."""
        return zip(self.steps, self.split, strict=True)

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
        for step, rows in self.by_step():
            step.schedule(self.part.mode, None if seq_lens_cpu is None else seq_lens_cpu[rows])

    def write_trees(self, trees: Sequence[HostTree]) -> None:
        """Bring trees of the host to the device, half by half."""
        for step, rows in self.by_step():
            assert isinstance(step.bound, BoundHostTrees)
            step.bound.write(trees[rows])

    def run(self) -> None:
        """Run the part; a recording has halves side by side."""
        if is_recording(self.packed.device):
            side_by_side(self.packed.device, *(partial(one.run, self.part) for one in self.steps))
        else:
            self.steps[0].run(self.part, *self.steps[1:])
        if self.part.has(ForwardMode.DRAFT_EXTEND):
            write_output(self.packed, self.host.packed, self.host.entry)

    def holders(self) -> tuple[Iterable[object], ...]:
        """Return what holds the tensors of states, table and pools."""
        step = self.steps[0]
        caches = [cache for slot in step.setup.slots for cache in slot.tensors().values()]
        # views of dictionaries: of their tensors, whichever these are by then
        states = [vars(one) for one in self._states()]
        states += [value for one in states for value in one.values() if isinstance(value, dict)]
        return (
            *(one.values() for one in states),
            (step.table.req_to_token, step.table.reserved),
            *((one,) if isinstance(one, torch.Tensor) else one for one in caches),
        )

    def _states(self) -> tuple[BufferSet, ...]:
        """Return what steps leave for each other."""
        step = self.steps[0]
        own = () if step.processing is None else (step.processing.processors,)
        return (step.states, *own)

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
            if step.processing is not None:
                found += step.processing.fingerprint()
            found += step.bound.fingerprint()
            for attention in step.attention(None):
                found += attention.fingerprint()
        return found
