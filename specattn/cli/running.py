"""A run of requests through an engine: its setup and its outcome."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specattn.cli.errors import ArgumentError, is_memory_error, naming_options
from specattn.engine.configs import smaller_configs
from specattn.engine.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from specattn.cli.loading import Models
    from specattn.config import SpecConfig
    from specattn.engine.request import Request, RequestOutput

# of each prompt: enough to compile every kernel
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Setup:
    """An engine's parts besides its speculative config.

    ``requests`` may be none, to capture graphs alone. ``options`` are keyword arguments of the
    engine. With ``warm_up``, `prepare` decodes a few tokens, so that compiling kernels is not
    measured.
    """

    models: Models
    requests: tuple[Request, ...]
    max_context_len: int
    batch_size: int
    options: dict[str, Any]
    warm_up: bool = False
    adaptive: bool = False

    def engine(self, config: SpecConfig) -> Engine:
        """Build the engine of a speculative config."""
        try:
            with naming_options():
                return self._engine(config)
        except (MemoryError, RuntimeError) as error:
            if not is_memory_error(error):
                raise
            others = (
                " or --buckets"
                if "buckets" in self.options
                else ", --batch-size or --max-new-tokens"
            )
            raise ArgumentError(
                "--max-context",
                f"the KV pools do not fit into the device's memory; lower --max-context{others}",
            ) from error

    def _engine(self, config: SpecConfig) -> Engine:
        config = replace(config, max_context_len=self.max_context_len, max_num_reqs=self.batch_size)
        return Engine(
            self.models.target,
            self.models.draft if config.num_steps else None,
            config,
            **self.options,
            configs=smaller_configs(config)[1:] if self.adaptive else (),
            tokenizer=self.models.tokenizer,
        )

    def prepare(self, engine: Engine) -> None:
        """Decode a few tokens of a full batch to compile all kernels."""
        if not self.warm_up:
            return
        few = engine.config.num_steps + 3  # the prompt's token and two steps at the least
        few_requests = [
            replace(
                request,
                prompt=request.prompt[:_WARM_UP_TOKENS],
                max_new_tokens=few,
                min_new_tokens=min(request.min_new_tokens, few),
                stop=(),
                ignore_eos=True,
            )
            for request in self.requests[: self.batch_size]
        ]
        with naming_options():
            engine.generate(few_requests)


@dataclass(frozen=True)
class ModeReport:
    """Counts of one mode's forwards, by how they ran.

    ``unrecorded`` counts forwards over the same static buffers where nothing is recorded (no CUDA,
    ``--no-graphs``, a backend that cannot be recorded), ``fallbacks`` batches that ran eagerly
    because no captured bucket held them.
    """

    mode: str
    backend: str
    replayed: int
    unrecorded: int
    fallbacks: int


@dataclass(frozen=True)
class ConfigReport:
    """The steps that took a speculative config, and what they accepted.

    ``steps`` counts those that gave some request a token; ``accepted_per_step`` is tokens per
    request and step, bonus included; 0 without steps.
    """

    num_steps: int
    topk: int
    num_draft_tokens: int
    steps: int
    accepted_per_step: float


@dataclass(frozen=True)
class Outcome:
    """A finished run, timed with its prompts.

    ``modes`` come in the order in which a step runs them, ``configs``, of adaptive runs alone, with
    the given one first.
    """

    results: tuple[RequestOutput, ...]
    seconds: float
    modes: tuple[ModeReport, ...]
    fused: tuple[str, ...] = ()
    configs: tuple[ConfigReport, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(result.tokens) for result in self.results)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all requests over the time of the run."""
        return self.num_tokens / self.seconds


def run(
    engine: Engine, requests: Sequence[Request], *on_tokens: Callable[[int, list[int]], None]
) -> Outcome:
    """Decode requests, time the run, and call ``on_tokens`` with all new tokens."""

    def tell(index: int, tokens: list[int]) -> None:
        for call in on_tokens:
            call(index, tokens)

    before = _counts(engine)
    begin = time.perf_counter()
    with naming_options():
        results = engine.generate(requests, tell)
    seconds = time.perf_counter() - begin
    since = _counts(engine) - before
    configs = engine.configs.all if engine.configs.adaptive else ()
    return Outcome(
        tuple(results),
        seconds,
        tuple(_mode_reports(engine, since)),
        _fused(engine),
        tuple(_config_report(config, since) for config in configs),
    )


def _counts(engine: Engine) -> Counter[tuple[object, str]]:
    """Count steps by config, and forwards by mode, and by how they ran."""
    configs, found = engine.configs, Counter[tuple[object, str]]()
    for config in configs.all:
        found[config, "steps"] = configs.used[config]
        found[config, "advanced"] = configs.advanced[config]
        found[config, "gained"] = configs.gained[config]
    for decoder in engine.decoders:
        stats = decoder.runner.stats
        for mode in decoder.modes:
            recorded = decoder.runner.recorded(mode)
            found[mode.value, "replayed" if recorded else "unrecorded"] += stats.replays[mode]
            found[mode.value, "fallbacks"] += stats.eager[mode]
    return found


def _mode_reports(engine: Engine, counts: Counter[tuple[object, str]]) -> Iterator[ModeReport]:
    modes = [mode.value for decoder in engine.decoders for mode in decoder.modes]
    for mode in dict.fromkeys(modes):
        slot = engine.draft if mode.startswith("draft") and engine.draft else engine.target
        served = [counts[mode, how] for how in ("replayed", "unrecorded", "fallbacks")]
        yield ModeReport(mode, slot.backend.name, *served)


def _config_report(config: SpecConfig, counts: Counter[tuple[object, str]]) -> ConfigReport:
    accepted = counts[config, "gained"] / max(counts[config, "advanced"], 1)
    shape = config.num_steps, config.topk, config.num_draft_tokens
    return ConfigReport(*shape, counts[config, "steps"], accepted)


def _fused(engine: Engine) -> tuple[str, ...]:
    """Return which of an engine's models are fused ones."""
    from specattn.models import LMDraft
    from specattn.models.fused.block import FusedModel

    draft: Any = engine.draft.model if engine.draft else None
    whole = draft.model if isinstance(draft, LMDraft) else draft
    models = {"target": engine.target.model, "draft": whole}
    return tuple(name for name, one in models.items() if isinstance(one, FusedModel))
