"""The step decoders of an engine's settings, and of plain decoding near a context's end."""

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

    Those of an engine's own settings are made, and captured, at once. Plain decoding, if it is none
    of them, is for requests whose contexts have room for nothing else: its decoder is made when it
    is first asked for, without a draft model, since nobody drafts again after it, and captured for
    the largest bucket alone, which holds whatever batch the others hold.

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
        sampled: bool,
        validate: Validate,
        tbo: bool,
    ) -> None:
        self.plans_on_host = any(
            slot.backend.host_plan for slot in (target, draft) if slot is not None
        )
        between = self.plans_on_host or validate == "debug"
        make = partial(
            StepDecoder, target, table=table, states=states, record=record, indices=indices,
            seams=seams or ("three" if between else "one"), recorder=Recorder(),
            validate=validate, tbo=tbo,
        )
        self._made = {
            config: make(draft, config, buckets=buckets, sampled=sampled) for config in configs
        }
        self._plain = configs[0].plain()
        self._make_plain = partial(make, None, self._plain, buckets=[max(buckets)])

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
        return self._made[config]

    def capture_sampled(self) -> None:
        """Capture all of them for requests that draw, too."""
        for decoder in self.made:
            decoder.capture(sampled=True)

    def settle(self) -> None:
        """Wait for every step in flight, whoever has not."""
        for decoder in self.made:
            decoder.settle()
