"""The step decoders of an engine's settings, and of those that steps shrink to."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from specattn.recording import Recorder
from specattn.spec.step_decoder import StepDecoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.backends.multi_step import Indices
    from specattn.config import SpecConfig
    from specattn.slots import SlotTable
    from specattn.spec.checks import Validate
    from specattn.spec.decoder import ModelSlot
    from specattn.spec.model import DraftModel, TargetModel
    from specattn.spec.states import RequestStates
    from specattn.spec.step_decoder import Seams


class EngineDecoders:
    """One `StepDecoder` per setting, over the same table, states and memory pool of graphs.

    Those of an engine's own settings are made, and captured, at once; others when they are first
    asked for, and these run eagerly.

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
    indices, validate, tbo
        As in `StepDecoder`.
    record : bool
        Whether to record CUDA graphs.
    seams : {"one", "three"}, optional
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
        seams: Seams | None,
        validate: Validate,
        tbo: bool,
    ) -> None:
        self._configs, self._draft, self._record = configs, draft, record
        self.plans_on_host = any(
            slot.backend.host_plan for slot in (target, draft) if slot is not None
        )
        between = self.plans_on_host or validate == "debug"
        self._make = partial(
            StepDecoder, target, table=table, states=states, buckets=buckets, indices=indices,
            seams=seams or ("three" if between else "one"), recorder=Recorder(),
            validate=validate, tbo=tbo,
        )
        self._made: dict[SpecConfig, StepDecoder] = {}
        for config in configs:
            self.of(config)

    @property
    def made(self) -> tuple[StepDecoder, ...]:
        """Every decoder made so far, those of the engine's own settings first."""
        return tuple(self._made.values())

    def of(self, config: SpecConfig) -> StepDecoder:
        """Return the decoder of a setting."""
        if config not in self._made:
            own = config in self._configs
            # a request that was shrunk to plain decoding never drafts again
            draft = self._draft if own or config.num_steps else None
            self._made[config] = self._make(
                draft=draft, config=config, record=self._record and own
            )
        return self._made[config]

    def capture_sampled(self) -> None:
        """Capture the engine's own settings for requests that draw."""
        for config in self._configs:
            self.of(config).capture(sampled=True)

    def settle(self) -> None:
        """Wait for every step in flight, whoever has not."""
        for decoder in self.made:
            decoder.settle()
