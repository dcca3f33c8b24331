"""The float64 answer for a few requests of a batch, and how far a result is from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from .batch import Batch

#: Largest relative L2 error of a 16-bit result; the best kernels have 2e-3 to 3e-3.
LIMIT = 8e-3
LSE_LIMIT = 1e-3
#: Of a prompt, the last query tokens are computed.
PROMPT_ROWS = 64


@dataclass(frozen=True)
class Answer:
    """What a request's query tokens ``first ..`` should give, from pool 0."""

    request: int
    first: int
    out: Tensor  # [rows, Hq, Dv] float64
    lse: Tensor  # [rows, Hq] float64


def answers(batch: Batch) -> list[Answer]:
    """Compute the first, the middle, the last and the longest request."""
    case = batch.case
    longest = max(range(case.batch), key=case.lengths.__getitem__)
    return [answer(batch, b) for b in sorted({0, case.batch // 2, case.batch - 1, longest})]


def answer(batch: Batch, b: int) -> Answer:
    case, n = batch.case, batch.case.lengths[b]
    rows = batch.accepted[b]
    first = max(0, rows - PROMPT_ROWS) if case.mode == "prompt" else 0
    slots = batch.table[b + 1, : n + case.tail].long()
    group = case.heads[0] // case.heads[1]
    k, v = batch.meant(batch.k(0), slots), batch.meant(batch.v(0), slots)
    q = batch.q[b * case.q_len + first : b * case.q_len + rows].double()
    q = q.unflatten(1, (case.heads[1], group))
    logits = torch.einsum("thgd,nhd->thgn", q, k) * batch.scale
    if case.logit_cap:
        logits = case.logit_cap * torch.tanh(logits / case.logit_cap)
    seen = torch.ones(rows - first, n + case.tail, dtype=torch.bool, device=q.device)
    seen[:, n:] = batch.visible(b)[first:rows]
    if case.window_left >= 0 and batch.bits is not None:
        place = torch.cat([torch.arange(n, device=q.device), batch.tail_positions[b]])
        distance = batch.positions[b][first:rows, None] - place
        seen &= (distance >= 0) & (distance <= case.window_left)
    logits.masked_fill_(~seen[:, None, None], -math.inf)
    lse = logits.logsumexp(-1)
    if batch.sinks is not None:
        lse = torch.logaddexp(lse, batch.sinks.double().view(1, case.heads[1], group))
    out = torch.einsum("thgn,nhd->thgd", logits.sub_(lse[..., None]).exp_(), v)
    return Answer(b, first, out.flatten(1, 2), lse.flatten(1, 2))


def error(batch: Batch, expected: list[Answer], out: Tensor, lse: Tensor | None) -> float:
    """Return the largest relative L2 error; infinite where a row is missing or a lse is off.

    ``out`` has ``q_len`` rows per request; of a ragged batch, those not accepted do not count.
    """
    case = batch.case
    worst = 0.0
    if not torch.isfinite(used_rows(batch, out)).all():
        return math.inf
    for want in expected:
        begin = want.request * case.q_len + want.first
        rows = slice(begin, begin + len(want.out))
        off = (out[rows].double() - want.out).norm() / want.out.norm()
        worst = max(worst, off.item())
        if lse is not None and (lse[rows].double() - want.lse).abs().max().item() > LSE_LIMIT:
            return math.inf
    return worst


def used_rows(batch: Batch, out: Tensor) -> Tensor:
    """Return the rows that somebody reads, packed."""
    if sum(batch.accepted) == len(out):
        return out
    return out[used_index(batch)]


def used_index(batch: Batch) -> Tensor:
    """``[rows]`` int64: where the accepted rows lie among ``q_len`` per request."""
    rows = [b * batch.case.q_len + i for b, n in enumerate(batch.accepted) for i in range(n)]
    return torch.tensor(rows, device=batch.device)
