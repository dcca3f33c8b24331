"""The steps of an engine that are on their way."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING

import torch

from specattn.checks import listed
from specattn.engine.ranks import decide
from specattn.speculative.proposers.host import HostProposer
from specattn.speculative.step.level import Level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.config import SpecConfig
    from specattn.engine.configs import SpeculativeConfigs
    from specattn.engine.decoders import Decoders
    from specattn.engine.metrics import Totals
    from specattn.engine.request import RequestOutput, RunningRequest
    from specattn.engine.scheduler import Groups, Scheduler
    from specattn.speculative.prompts.runner import FirstToken
    from specattn.speculative.proposers.host import HostTree
    from specattn.speculative.step.host_buffers import PendingStep

    Gain = tuple[RequestOutput, list[int]]


@dataclass(eq=False)
class LaunchedStep:
    """A step of one group of requests that is on its way."""

    config: SpecConfig
    group: list[RunningRequest]
    pending: PendingStep
    # seconds, by `time.perf_counter`; None if something else ran since
    launched_at: float | None
    # which of all launches it was
    order: int
    # whose drafts had read their texts, None if they always do; whether it left the draft out
    ready: list[bool] | None
    bare: bool
    # whether an error has kept it from being handed out
    kept: bool = False


@dataclass(eq=False)
class LaunchedPrompt:
    """A prompt that is on its way to its first token."""

    one: RunningRequest
    first: FirstToken
    order: int
    # seconds, by `time.perf_counter`, of the last of so many chunks that steps came between
    launched_at: float
    chunks: int


class Flight:
    """Launches the steps of an engine, and hands out what they gain.

    Parameters
    ----------
    decoders : Decoders
        By config.
    scheduler : Scheduler
        Says who steps next, and who ends.
    configs : SpeculativeConfigs
        Told what steps gained, and how long they took.
    totals : Totals
        What the engine counts.

    Attributes
    ----------
    steps : list of LaunchedStep
        Launched and not handed out: the groups of one step.
    prompts : list of LaunchedPrompt
        Launched, and their first tokens not handed out.
    chunk_last : bool
        Whether no step was launched since a chunk of prompts was.
    """

    def __init__(
        self,
        decoders: Decoders,
        scheduler: Scheduler,
        configs: SpeculativeConfigs,
        totals: Totals,
    ) -> None:
        self.steps: list[LaunchedStep] = []
        self.prompts: list[LaunchedPrompt] = []
        self.chunk_last = False
        self._orders = count()
        # whether an error has kept prompts from being handed out
        self._kept = False
        self._by_host = isinstance(decoders.setup.proposer, HostProposer)
        self._decoders, self._scheduler, self._configs = decoders, scheduler, configs
        self._totals = totals
        self._plans_on_host = decoders.setup.plans_on_host
        # when the last one was handed out
        self._collected_at = 0.0

    @property
    def idle(self) -> bool:
        """Whether a step is to be launched before anything is handed out."""
        return not self.steps and not (self._kept and self.prompts)

    def expect(
        self,
        admitted: Sequence[RunningRequest],
        firsts: Sequence[FirstToken],
        began: float,
        chunks: int = 1,
    ) -> None:
        """Note that prompts were launched, from ``began`` on.

        Of one in several ``chunks`` with steps between, it was the last.
        """
        for one, first in zip(admitted, firsts, strict=True):
            self._scheduler.await_first(one, by_host=self._by_host)
            self.prompts.append(LaunchedPrompt(one, first, next(self._orders), began, chunks))

    def launch(self, groups: Groups) -> None:
        """Launch a step of every group; errors are raised after that."""
        failed: Exception | None = None
        for config, group in groups.items():
            try:
                self.steps.append(self._launch_group(config, group))
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def take(self, *, ahead: bool) -> list[LaunchedStep]:
        """Return the steps to collect; launch the next ones first if ``ahead``."""
        following = self._launch_ahead() if ahead else []
        steps, self.steps = self.steps, following
        return steps

    def take_prompts(self) -> list[LaunchedPrompt]:
        """Return the next chunk's prompts, if it comes before steps."""
        self._kept = False
        if not self.prompts or (self.steps and self.steps[0].order < self.prompts[0].order):
            return []
        chunk = self.prompts[0].first.pending
        due = [one for one in self.prompts if one.first.pending is chunk]
        self.prompts = [one for one in self.prompts if one.first.pending is not chunk]
        return due

    def read(self, prompts: Sequence[LaunchedPrompt]) -> list[Gain]:
        """Wait for first tokens; return who gained what.

        Who was dropped gets nothing.
        """
        gains = []
        for launched in prompts:
            one, token = launched.one, launched.first.wait()
            began, now = max(launched.launched_at, self._collected_at), time.perf_counter()
            # of a chunk, its first prompt gets all
            self._configs.prompt_took((now - began) * launched.chunks)
            self._collected_at = now
            if one.result.finish_reason:
                continue
            one.awaited, one.result.first_token_at = False, self._collected_at
            kept = self._scheduler.append(one, [token], launched.first.logprobs)
            gains.append((one.result, kept))
        return gains

    def first_tokens(self, prompts: Sequence[LaunchedPrompt]) -> list[Gain]:
        """Do what `read` does, and count what was gained."""
        gains = self.read(prompts)
        for result, kept in gains:
            self._totals.began(result, len(kept))
        return gains

    def collect(self, steps: Sequence[LaunchedStep]) -> list[Gain]:
        """Wait for steps; return who gained what.

        Who had ended before gets nothing.
        """
        return list(chain.from_iterable(map(self._collect_group, steps)))

    def untimed(self) -> None:
        """Note that something else runs before the next step is collected."""
        for step in self.steps:
            step.launched_at = None

    def keep(self) -> None:
        """Note that an error came before anything was handed out.

        The next step hands it out, and launches nothing before it.
        """
        self._kept = True
        for step in self.steps:
            step.kept, step.launched_at = True, None

    def _launch_ahead(self) -> list[LaunchedStep]:
        """Launch the step after the one in flight, if both surely fit."""
        if self._plans_on_host or self._by_host or len(self.steps) != 1:
            # lengths are planned, or drafts made, after the tokens of the step before
            return []
        (step,) = self.steps
        # a grammar has to know these tokens, and what was kept by an error comes alone
        if step.kept or any(one.grammar is not None for one in step.group):
            return []
        groups = self._scheduler.schedule_ahead(step.config, step.group)
        return [self._launch_group(config, group) for config, group in groups.items()]

    def _launch_group(self, config: SpecConfig, group: list[RunningRequest]) -> LaunchedStep:
        lens = None
        if self._plans_on_host:
            lens = torch.tensor([one.length for one in group], dtype=torch.int32)
        rows = [one.row for one in group]
        level, decoder = max(one.level for one in group), self._decoders[config]
        ready, bare = self._readiness(config, group)
        if bare:
            assert self._decoders.bare is not None
            decoder = self._decoders.bare
        began = time.perf_counter()
        pending = decoder.step_async(
            rows,
            level=level,
            seq_lens_cpu=lens,
            grammars=[one.grammar for one in group] if level is Level.CONSTRAINED else None,
            trees=self._trees(config, group),
        )
        # a part of a prompt in front of it is not read, and would be counted as the step's time
        part, self.chunk_last = self.chunk_last and not self.prompts, False
        launched_at = None if part else began
        for one in group if bare else ():
            one.ready = False
        return LaunchedStep(config, group, pending, launched_at, next(self._orders), ready, bare)

    def _readiness(
        self, config: SpecConfig, group: list[RunningRequest]
    ) -> tuple[list[bool] | None, bool]:
        """Return whose drafts are up to date; whether a step needs none."""
        if self._configs.bare is None:
            return None, False
        ready = [one.ready for one in group]
        return ready, self._configs.leaves_out(config, sum(ready))

    def _trees(self, config: SpecConfig, group: list[RunningRequest]) -> list[HostTree] | None:
        """Ask a proposer on the host, rank 0's for all."""
        proposer = self._decoders.setup.proposer
        if not isinstance(proposer, HostProposer) or not config.num_steps:
            return None
        name = f"what {type(proposer).__name__}.draft returns"
        return decide(
            self._configs.ranks,
            lambda: listed(name, proposer.draft(tuple(group), config), "HostTree"),
        )

    def _collect_group(self, step: LaunchedStep) -> list[Gain]:
        gained = step.pending.wait()
        self._totals.stepped(step.config, len(gained))
        now, began = time.perf_counter(), step.launched_at
        # a step that was launched ahead began when the one before it ended
        seconds = None if began is None else now - max(began, self._collected_at)
        self._collected_at = now
        counts, gains = [0] * len(gained), []
        for at, (one, tokens) in enumerate(zip(step.group, gained, strict=True)):
            if one.result.finish_reason:  # it had ended, and rode along
                continue
            one.length += len(tokens)
            # -1 comes last, if at all
            counts[at] = len(tokens) - (bool(tokens) and tokens[-1] < 0)
            kept = self._scheduler.append(one, tokens, partial(step.pending.logprobs, at))
            one.result.accept_lens.append(len(kept))
            self._totals.kept(one.result, len(kept))
            gains.append((one.result, kept))
        if self._configs.bare is not None:
            self._configs.ended(sum(bool(result.finish_reason) for result, _ in gains))
        handed_out = sum(len(kept) for _, kept in gains)
        self._configs.count(step.config, counts, handed_out, seconds, step.ready, bare=step.bare)
        return gains
