"""How draft tokens are chosen: the most probable, or a drawn one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from specattn.kernels.sampling import DRAFT, draw_tokens, target_probs, top_tokens, uniform

if TYPE_CHECKING:
    from specattn.speculative.model import DraftModel


@dataclass(frozen=True)
class DraftTokens:
    """Proposed tokens: probs and target ids ``[R, K]``.

    ``draft_probs`` is the ``[R, Vd]`` that they were drawn from; ``[R, 0]`` unless they are drawn.
    """

    probs: Tensor
    tokens: Tensor
    draft_probs: Tensor


class Draws(Protocol):
    """Each request's temperature (0 is greedy) and seed, ``[R]`` each."""

    @property
    def temperature(self) -> Tensor:
        """float32."""

    @property
    def seeds(self) -> Tensor:
        """int64."""


def choose_tokens(
    draft: DraftModel, logits: Tensor, topk: int, draws: Draws | None, positions: Tensor
) -> DraftTokens:
    """Choose each row's draft tokens: the most probable, or a drawn one.

    Among equal logits the lower draft token comes first.

    Parameters
    ----------
    draft : DraftModel
        Maps its vocabulary to the target's; with ``target_ids`` (see `DraftModel.to_target`), in
        the launch that chooses.
    logits : Tensor
        ``[R, Vd]``.
    topk : int
        Tokens per row; 1 where they are drawn.
    draws : Draws or None
        How each request draws; None takes the most probable tokens.
    positions : Tensor
        ``[R]`` int64, the target position of the token that each row's proposal follows. Only
        draws read it.
    """
    if draws is None:
        shape = (len(logits), topk)
        probs = torch.empty(shape, dtype=torch.float32, device=logits.device)
        ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
        named = draft.target_ids
        top_tokens(logits, topk, probs_out=probs, ids_out=ids, target_ids=named)
        tokens = draft.to_target(ids) if named is None else ids
        return DraftTokens(probs, tokens, probs[:, :0])
    drawn_from = target_probs(logits, draws.temperature, None, None, rows_per_req=1)
    coins = uniform(draws.seeds, positions, DRAFT)
    ids = draw_tokens(drawn_from, coins)[:, None]
    return DraftTokens(drawn_from.gather(1, ids), draft.to_target(ids), drawn_from)
