"""How draft tokens are chosen: the most probable ones, or one drawn from the draft's law."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from specattn.buffers import BufferSet, buf
from specattn.kernels.sampling import DRAFT, draw_tokens, target_probs, top_tokens, uniform

if TYPE_CHECKING:
    from specattn.config import SpecConfig
    from specattn.speculative.model import DraftModel


@dataclass(frozen=True)
class Coins(BufferSet):
    """How each request draws draft tokens; read with ``SpecConfig.draft_sampling`` only."""

    temperature: Tensor = buf(lambda _: (), torch.float32)
    seeds: Tensor = buf(lambda _: (), torch.int64)


def drawing_names(config: SpecConfig) -> tuple[str, ...]:
    """Return the values a draft program takes to draw with."""
    return ("temperature", "seeds") if config.draft_sampling else ()


@dataclass(frozen=True)
class Chosen:
    """Draft tokens: probabilities and target ids ``[R, K]``, and the law they were drawn from."""

    probs: Tensor
    tokens: Tensor
    law: Tensor


class Drawing(Protocol):
    """Where `choose_tokens` finds each request's temperature and seed, ``[B]`` each."""

    @property
    def temperature(self) -> Tensor:
        """float32; 0 is greedy."""

    @property
    def seeds(self) -> Tensor:
        """int64."""


def choose_tokens(
    draft: DraftModel, logits: Tensor, config: SpecConfig, drawing: Drawing, positions: Tensor
) -> Chosen:
    """Choose each row's draft tokens: the most probable ``topk``, or one drawn by its law.

    Among equal logits the lower draft token comes first.

    Parameters
    ----------
    draft : DraftModel
        Maps its vocabulary to the target's; with ``target_ids`` (see `DraftModel.to_target`), in
        the launch that chooses.
    logits : Tensor
        ``[R, Vd]``.
    config : SpecConfig
        ``topk`` and ``draft_sampling``.
    drawing : Drawing
        With ``draft_sampling``, R = B.
    positions : Tensor
        ``[R]`` int64, the target position of the token each row's proposal follows; read with
        ``draft_sampling`` only.
    """
    if not config.draft_sampling:
        shape = (len(logits), config.topk)
        probs = torch.empty(shape, dtype=torch.float32, device=logits.device)
        ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
        named: Tensor | None = getattr(draft, "target_ids", None)
        top_tokens(logits, config.topk, probs_out=probs, ids_out=ids, target_ids=named)
        tokens = draft.to_target(ids) if named is None else ids
        return Chosen(probs, tokens, probs[:, :0])
    law = target_probs(logits, drawing.temperature, None, None, rows_per_req=1)
    coins = uniform(drawing.seeds, positions, DRAFT)
    ids = draw_tokens(law, coins)[:, None]
    return Chosen(law.gather(1, ids), draft.to_target(ids), law)
