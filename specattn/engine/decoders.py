"""The decoders of an engine, captured for what requests ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specattn.config import SpecConfig
from specattn.speculative.prompts.prefill import leave_nothing
from specattn.speculative.proposers.drafts import NoProposer
from specattn.speculative.sampling.grammar import bitmask_of
from specattn.speculative.sampling.processors import ProcessorStates
from specattn.speculative.step.decoder import StepDecoder
from specattn.speculative.step.level import Level

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from specattn.cuda_graph import GraphReport
    from specattn.engine.configs import SpeculativeConfigs
    from specattn.engine.request import RunningRequest
    from specattn.speculative.proposers.proposer import Proposer
    from specattn.speculative.sampling.logits_processor import LogitsProcessor
    from specattn.speculative.step.setup import StepSetup


class Decoders(dict[SpecConfig, StepDecoder]):
    """A decoder per config; requests may have more of them captured.

    That of plain decoding, if it is none of the configs, is made when it is first asked for; see
    `specattn.engine.engine.Engine.decoder`.

    Parameters
    ----------
    setup : StepSetup
        What all have in common; plain decoding of its config may be asked for, too.
    configs : sequence of SpecConfig
        Those whose decoders are made now.
    buckets : sequence of int
        Batch sizes to capture.
    own : sequence of LogitsProcessor
        Those of the user, which requests may ask for.
    levels : collection of Level
        Those that are captured now, besides greedy steps.
    rests : tuple of (SpecConfig, Proposer), optional
        The config of plain decoding of which there is a second decoder, and what of the draft's
        proposer takes part in that.

    Attributes
    ----------
    bare : StepDecoder or None
        That decoder.
    processors : ProcessorStates or None
        What requests ask of their logits; None until one asks for anything.
    """

    def __init__(
        self,
        setup: StepSetup,
        configs: Sequence[SpecConfig],
        buckets: Sequence[int],
        own: Sequence[LogitsProcessor],
        levels: Collection[Level],
        rests: tuple[SpecConfig, Proposer] | None = None,
    ) -> None:
        super().__init__()
        self.setup, self._buckets, self._own = setup, buckets, own
        self.processors = self._alloc_processors() if Level.PROCESSED in levels else None
        for one in configs:
            self[one] = StepDecoder.of(
                replace(setup, config=one),
                buckets=buckets,
                levels=levels,
                processors=self.processors,
            )
        self.bare: StepDecoder | None = None
        if rests is not None:
            self.bare = self._plain(*rests, buckets, levels)
        # levels whose captures were tried, by decoder: another capture would wait for the device
        self._tried = {(one, level) for one in self.each for level in levels}

    def __missing__(self, config: SpecConfig) -> StepDecoder:
        if config.num_steps:
            config = config.reserving(self.setup.proposer.draft_len(config))
            if config in self:
                return self[config]
        if config != self.setup.config.plain():
            raise ValueError(f"config must be one of the engine's configs, got {config}")
        levels = frozenset[Level]().union(*(one.levels for one in self.values()))
        # it holds whatever batch the others hold
        buckets = [max(self._buckets)]
        self[config] = found = self._plain(config, NoProposer(), buckets, levels, or_eager=True)
        self._tried.update((found, level) for level in levels)
        return found

    @property
    def each(self) -> tuple[StepDecoder, ...]:
        """All decoders."""
        return (*self.values(), *(() if self.bare is None else (self.bare,)))

    def report(self) -> dict[SpecConfig, tuple[GraphReport, ...]]:
        """Return what capturing took, by the config of each decoder, and bucket."""
        found = {config: decoder.report() for config, decoder in self.items()}
        if self.bare is not None:
            found[self.bare.config] = *found[self.bare.config], *self.bare.report()
        return found

    def settle(self) -> None:
        """Wait for every step in flight, whoever has not."""
        for decoder in self.each:
            decoder.settle()

    def _plain(
        self,
        config: SpecConfig,
        proposer: Proposer,
        buckets: Sequence[int],
        levels: Collection[Level],
        *,
        or_eager: bool = False,
    ) -> StepDecoder:
        """Return a decoder of plain decoding."""
        return StepDecoder.of(
            replace(self.setup, config=config, proposer=proposer),
            buckets=buckets,
            levels=levels,
            processors=self.processors,
            or_eager=or_eager,
        )

    def capture_for(self, levels: Iterable[Level]) -> None:
        """Capture the levels of steps that requests need, unless that was tried."""
        for level in sorted(levels):
            if level is Level.PROCESSED and self.processors is None:
                self.processors = self._alloc_processors()
            for decoder in self.each:
                if (decoder, level) not in self._tried:
                    states = self.processors if level is Level.PROCESSED else None
                    decoder.capture(level, processors=states, or_eager=True)
                    self._tried.add((decoder, level))

    def blocked(self, one: RunningRequest) -> bool:
        """Whether what a request asks of its logits left no token."""
        if one.level < Level.PROCESSED or self.processors is None:
            return False
        vocab, mask = self.setup.target.model.vocab_size, None
        if one.grammar is not None:
            mask = bitmask_of(one.grammar, one.tokens[-1:], [-1], vocab, pin=False)
        return leave_nothing(self.processors, one.row, len(one.tokens), mask)

    def _alloc_processors(self) -> ProcessorStates:
        req_to_token = self.setup.table.req_to_token
        vocab = self.setup.target.model.vocab_size
        return ProcessorStates.alloc(
            len(req_to_token),
            vocab,
            req_to_token.device,
            processors=self._own,
            max_context_len=req_to_token.shape[1],
        )


def rests_of(proposer: Proposer, configs: SpeculativeConfigs) -> tuple[SpecConfig, Proposer] | None:
    """Let a draft rest, where it and the policy can.

    Returns the config of plain decoding without its model, and what of the proposer takes part in
    that; None if it never rests.
    """
    # what a draft draws is proposed with its probability, and must be of the same text
    resting = None if configs.all[0].draft_sampling else proposer.at_rest(NoProposer())
    if resting is not None:
        configs.let_rest()
    return None if configs.resting is None or resting is None else (configs.resting, resting)
