"""Attention in float64, over lists of the keys that each row sees.

Nothing here is shared with the backends: the oracle is what they are held to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specattn.batch import RowLayout

NAN = float("nan")
#: Relative L2 error over all rows; the worst row may have 2.5 times as much.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
#: The same over a float8 pool, against attention over what it holds; at most.
QUANTISED = 3e-3
# NaNs whose payload arithmetic on the pools' NaNs does not give: what holds one was not written
_UNWRITTEN = {
    torch.float32: (torch.int32, 0x7FC0BEEF),
    torch.float16: (torch.int16, 0x7EEF),
    torch.bfloat16: (torch.int16, 0x7FEF),
}


class ConformanceError(AssertionError):
    """A backend breaks a property that it declares.

    Parameters
    ----------
    broken : str
        The property, as `docs/conformance.md` names it.
    detail : str
        What was seen, and what was expected.
    """

    def __init__(self, broken: str, detail: str) -> None:
        self.broken, self.detail = broken, detail
        super().__init__(f"{broken}: {detail}")


@dataclass(frozen=True)
class Tolerances:
    """How far a backend may be from the oracle.

    Parameters
    ----------
    out : mapping
        Relative L2 error of the output by dtype, `TOLERANCE` for those that are left out; the worst
        row may have 2.5 times as much.
    lse : float
        Absolute error of the lse, relative where the lse is above 1.
    cap : float
        Error of the library's tanh (2e-3 for ``tanh.approx``), added to both, times the cap.
    """

    out: Mapping[torch.dtype, float] = field(default_factory=lambda: TOLERANCE)
    lse: float = 2e-5
    cap: float = 0.0


@dataclass
class Case:
    """The tensors of one forward.

    Parameters
    ----------
    q, k_cache, v_cache, out, lse : Tensor
        As `specattn.backends.base.BoundAttention.run` takes them.
    args : dict
        The tensors that describe the forward, by the names of the plan's fields.
    sm_scale, window_left, logit_cap, latent
        As in `specattn.config.AttnConfig`.
    deterministic : bool
        As in `specattn.config.AttnConfig`.
    sinks : Tensor, optional
        ``[Hq]`` logits without values.
    kv_scales : tuple of float
        What keys and values are to be multiplied by.
    kind : {"tree", "lists", "extend"}
        Which plan it makes: `AttnPlan`, `CsrPlan` or `ExtendPlan`.
    layout : RowLayout, optional
        Of the tree and lists kinds.
    prefix_lens : list of int
        Prefix length of every request, padding included: the host mirror.
    live : int
        Rows of ``q`` before the padding's.
    out_slots : Tensor, optional
        The slots the forward writes.
    page_size : int
        Slots of a page.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    out: Tensor
    lse: Tensor
    args: dict[str, Any]
    sm_scale: float
    window_left: int = -1
    logit_cap: float = 0.0
    latent: bool = False
    kind: Literal["tree", "lists", "extend"] = "tree"
    layout: RowLayout | None = None
    prefix_lens: list[int] = field(default_factory=list)
    live: int = 0
    out_slots: Tensor | None = None
    page_size: int = 1
    kv_scales: tuple[float, float] = (1.0, 1.0)
    deterministic: bool = False
    sinks: Tensor | None = None

    @property
    def kv_dtype(self) -> torch.dtype | None:
        """Of stored keys and values, if not that of q."""
        return None if self.k_cache.dtype == self.q.dtype else self.k_cache.dtype

    def of_rows(self, rows: Tensor | list[int]) -> Case:
        """Return the case of some query rows, with outputs of its own."""
        out, lse = torch.empty_like(self.out[rows]), torch.empty_like(self.lse[rows])
        return replace(self, q=self.q[rows], out=out, lse=lse, live=len(rows))

    def clear(self) -> None:
        """Fill the outputs with a NaN of their own."""
        for tensor in (self.out, self.lse):
            as_int, bits = _UNWRITTEN[tensor.dtype]
            tensor.view(as_int).fill_(bits)

    @property
    def settings(self) -> dict[str, Any]:
        """Scale, window and cap, by the names the kernels take."""
        return {
            "sm_scale": self.sm_scale,
            "window_left": self.window_left,
            "logit_cap": self.logit_cap,
        }

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return what ``out`` and ``lse`` must be, in float64."""
        seen = self._seen()
        used = seen.any(0).nonzero()[:, 0]
        seen = seen[:, None, used].double()  # [R, 1, N]
        keys, values = (
            # what is NaN is padding's, and 0 times NaN would be NaN for everybody
            (pool.cpu()[used].double() * scale).nan_to_num(0)  # [N, Hkv, D or Dv]
            for pool, scale in zip((self.k_cache, self.v_cache), self.kv_scales, strict=True)
        )
        # consecutive query heads share a KV head
        groups = keys.shape[1], self.q.shape[1] // keys.shape[1]
        queries = self.q.cpu().double().unflatten(1, groups)
        logits = torch.einsum("rhgd,nhd->rhgn", queries, keys).flatten(1, 2) * self.sm_scale
        if self.logit_cap:
            logits = self.logit_cap * torch.tanh(logits / self.logit_cap)
        # a key that is listed twice counts twice
        logits = logits.masked_fill(seen == 0, -math.inf) + seen.clamp(min=1).log()
        lse = torch.logsumexp(logits, 2)
        if self.sinks is not None:
            lse = torch.logaddexp(lse, self.sinks.cpu().double())
        shares = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0)[..., None])
        out = torch.einsum("rhgn,nhd->rhgd", shares.unflatten(1, groups), values)
        return out.flatten(1, 2), lse

    def _seen(self) -> Tensor:
        """Return ``[R, slots]``: how often each query row sees each slot."""
        lists, slots = visible_slots(self), len(self.k_cache)
        sizes = torch.tensor([len(some) for some in lists])
        rows = torch.arange(len(lists)).repeat_interleave(sizes)
        flat = torch.tensor([slot for some in lists for slot in some], dtype=torch.int64)
        return torch.bincount(rows * slots + flat, minlength=len(lists) * slots).view(-1, slots)


def _visible(pos_q: int, pos_k: int, window_left: int) -> bool:
    return window_left < 0 or 0 <= pos_q - pos_k <= window_left


def _lists_of(args: dict[str, Any]) -> dict[str, Any]:
    return {name: t.tolist() for name, t in args.items() if isinstance(t, Tensor)}


def tree_lists(case: Case) -> list[list[int]]:
    """Visible slots of every query row of a tree case."""
    a = _lists_of(case.args)
    lists = []
    for b, prefix in enumerate(a["seq_lens"]):
        row = a["req_to_token"][a["req_pool_indices"][b]]
        for i, pos in enumerate(a["positions"][b]):
            slots = [row[p] for p in range(prefix) if _visible(pos, p, case.window_left)]
            for j, slot in enumerate(a["tail_slots"][b]):
                bit = (a["tail_words"][b][i][j // 64] >> (j % 64)) & 1
                if bit and _visible(pos, a["tail_positions"][b][j], case.window_left):
                    slots.append(slot)
            lists.append(slots)
    return lists


def extend_lists(case: Case) -> list[list[int]]:
    """Visible slots of every new token of a ragged extend."""
    a = _lists_of(case.args)
    lists = []
    for b, prefix in enumerate(a["seq_lens"]):
        row = a["req_to_token"][a["req_pool_indices"][b]]
        for i in range(a["qo_indptr"][b + 1] - a["qo_indptr"][b]):
            pos = prefix + i
            keys = range(pos + 1)
            lists.append([row[p] for p in keys if _visible(pos, p, case.window_left)])
    return lists


def csr_lists(case: Case) -> list[list[int]]:
    """Visible slots of every list: the query stands at its last key."""
    indptr, indices = case.args["kv_indptr"].tolist(), case.args["kv_indices"].tolist()
    lists = []
    for begin, end in pairwise(indptr):
        last = end - begin - 1
        found = enumerate(indices[begin:end])
        lists.append([slot for p, slot in found if _visible(last, p, case.window_left)])
    return lists


def visible_slots(case: Case) -> list[list[int]]:
    """Visible slots of every query row."""
    found = {"tree": tree_lists, "lists": csr_lists, "extend": extend_lists}
    return found[case.kind](case)


def unwritten(tensor: Tensor) -> Tensor:
    """Where ``tensor`` still holds what `Case.clear` put there."""
    as_int, bits = _UNWRITTEN[tensor.dtype]
    return tensor.view(as_int) == bits


def head(case: Case, expected: tuple[Tensor, Tensor]) -> tuple[Case, tuple[Tensor, Tensor]]:
    """Drop the padding rows of the outputs."""
    rows = slice(0, case.live)
    kept = replace(case, out=case.out[rows], lse=case.lse[rows])
    return kept, (expected[0][rows], expected[1][rows])


def check(
    case: Case,
    expected: tuple[Tensor, Tensor],
    *,
    lse: bool = True,
    tolerances: Tolerances | None = None,
    broken: str = "accuracy",
) -> None:
    """Hold ``case.out`` (and ``case.lse``) to the oracle's; rows without keys exactly.

    Raises
    ------
    ConformanceError
        Naming what is broken: outputs that were not written, NaN from unused memory, rows without
        keys, the lse, or else ``broken``.
    """
    allowed = tolerances or Tolerances()
    want, want_lse = expected
    got = case.out.double().cpu()
    missing = unwritten(case.out).any(-1).any(-1).sum()
    _require(not missing, "written outputs", f"{missing} of {len(got)} rows of out not written")
    lost = (~got.isfinite()).sum()
    _require(not lost, "unused memory", f"{lost} values of out are not finite")
    blind = want_lse == -math.inf
    _require(not got[blind].any(), "rows without keys", "a row without keys must be 0")
    slack = allowed.cap * case.logit_cap
    limit = (TOLERANCE | dict(allowed.out))[case.q.dtype]
    if case.kv_dtype is not None:
        limit = min(limit, QUANTISED)
    limit += slack
    error = (got - want).norm(dim=-1)
    scale = want.norm(dim=-1)
    total = error.norm() / scale.norm().clamp_min(1e-30)
    _require(total <= limit, broken, f"relative error {total:.2e} above {limit:.1e}")
    if not len(got):
        return
    floor = (scale.square().mean().sqrt()).clamp_min(1e-30)
    worst = (error / scale.clamp_min(floor)).max()
    _require(worst <= 2.5 * limit, broken, f"worst row {worst:.2e} above {2.5 * limit:.1e}")
    if lse:
        _check_lse(case, want_lse, allowed.lse + slack)


def _check_lse(case: Case, want: Tensor, limit: float) -> None:
    got, blind = case.lse.double().cpu(), want == -math.inf
    missing = unwritten(case.lse).any(-1).sum()
    _require(not missing, "written outputs", f"{missing} of {len(got)} rows of lse not written")
    _require((got[blind] == -math.inf).all(), "rows without keys", "the lse must be -inf")
    off = (got - want)[~blind].abs() / want[~blind].abs().clamp_min(1)
    # bf16 and fp16 rows: the logits are exact products, only their sum is rounded
    _require(
        not off.numel() or off.max() <= limit,
        "lse",
        f"off by {off.max() if off.numel() else 0:.2e}, above {limit:.0e} (natural log)",
    )


def _require(holds: Tensor | bool, broken: str, detail: str) -> None:
    if not holds:
        raise ConformanceError(broken, detail)
