"""The step decoders of an engine's settings, and of plain decoding near a context's end."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from specattn.cuda_graph.recorder import Recorder
from specattn.errors import CaptureError
from specattn.speculative.step_decoder import StepDecoder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specattn.backends.multi_step import Indices
    from specattn.cache.slot_table import SlotTable
    from specattn.config import SpecConfig
    from specattn.speculative.decoder import ModelSlot
    from specattn.speculative.model import DraftModel, TargetModel
    from specattn.speculative.states import RequestStates
    from specattn.speculative.step_decoder import CudagraphMode
    from specattn.speculative.validation import Validate

log = logging.getLogger(__name__)


@contextmanager
def _eager_if_it_fails(decoder: StepDecoder) -> Iterator[None]:
    """Warn of a capture that fails; the steps that it was for run eagerly."""
    try:
        yield
    except CaptureError as error:
        log.warning("%s; batches run eagerly unless a captured bucket holds them", error)
        decoder.runner.leave_eager(decoder.modes)


class _LateDecoder(StepDecoder):
    """A decoder that is made while requests run: none of them may end because of its captures."""

    def capture(self, *, sampled: bool = False) -> None:
        """Capture what is not captured yet; what cannot be captured runs eagerly."""
        with _eager_if_it_fails(self):
            super().capture(sampled=sampled)


class EngineDecoders:
    """One `StepDecoder` per setting, over the same table, states and memory pool of graphs.

    Those of an engine's own settings are made, and captured, at once. Plain decoding, if it is none
    of them, is for requests whose contexts have room for nothing else: its decoder is made when it
    is first asked for, without a draft model, since nobody drafts again after it, and captured for
    the largest bucket alone, which holds whatever batch the others hold.

    What is captured late, while requests run, does no harm if it fails: a warning is logged, and
    the steps that it was for run eagerly. What is captured at once raises (`StepDecoder`).

    Parameters
    ----------
    target, draft : ModelSlot
        The models; without a draft model it is None.
    configs : tuple of SpecConfig
        The engine's own settings.
    table : SlotTable
        Rows and slots of the requests.
    states : RequestStates
        Their states.
    buckets : sequence of int
        Batch sizes to capture.
    sampled, indices, validate, tbo
        As in `StepDecoder`.
    record : bool
        Whether to record CUDA graphs.
    cudagraph : {"full", "piecewise"}, optional
        By default one graph, and three where something happens on the host between them.

    Attributes
    ----------
    plans_on_host : bool
        Whether attention needs the lengths on the host before a step.
    """

    def __init__(
        self,
        target: ModelSlot[TargetModel],
        draft: ModelSlot[DraftModel] | None,
        configs: tuple[SpecConfig, ...],
        table: SlotTable,
        states: RequestStates,
        *,
        buckets: Sequence[int],
        indices: Indices,
        record: bool,
        cudagraph: CudagraphMode | None,
        sampled: bool,
        validate: Validate,
        tbo: bool,
    ) -> None:
        self.plans_on_host = any(
            slot.backend.host_plan for slot in (target, draft) if slot is not None
        )
        between = self.plans_on_host or validate == "debug"
        options: dict[str, Any] = {
            "record": record,
            "indices": indices,
            "recorder": Recorder(),
            "validate": validate,
            "tbo": tbo,
            "cudagraph": cudagraph or ("piecewise" if between else "full"),
        }
        self._made = {
            config: StepDecoder(
                target, draft, config, table, states, buckets=buckets, sampled=sampled, **options
            )
            for config in configs
        }
        self._plain = configs[0].plain()
        self._make_plain = partial(
            _LateDecoder,
            target,
            None,
            self._plain,
            table,
            states,
            buckets=[max(buckets)],
            **options,
        )
        # the settings that `capture_sampled` is through with
        self._drawing: set[SpecConfig] = set()

    @property
    def made(self) -> tuple[StepDecoder, ...]:
        """Those of the engine's settings, then that of plain decoding if it was asked for."""
        return tuple(self._made.values())

    def of(self, config: SpecConfig) -> StepDecoder:
        """Return the decoder of one of the engine's settings, or of plain decoding.

        Raises
        ------
        ValueError
            If it is neither.
        """
        if config not in self._made:
            if config != self._plain:
                raise ValueError(f"config must be one of the engine's settings, got {config}")
            sampled = any(decoder.sampled for decoder in self.made)
            self._made[config] = self._make_plain(sampled=sampled)
            if sampled:
                self._drawing.add(config)
        return self._made[config]

    def capture_sampled(self) -> None:
        """Capture all of them for requests that draw, too; once, whether it fails or not."""
        for config, decoder in self._made.items():
            if config not in self._drawing:
                with _eager_if_it_fails(decoder):
                    decoder.capture(sampled=True)
                self._drawing.add(config)

    def settle(self) -> None:
        """Wait for every step in flight, whoever has not."""
        for decoder in self.made:
            decoder.settle()
