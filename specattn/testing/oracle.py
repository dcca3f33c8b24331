"""Attention in float64, over lists of the keys that each row sees.

Nothing here is shared with the backends: the oracle is what they are held to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import compress, pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from specattn.batch import RowLayout

    # a query's position, and slot and position of each key before windows
    Row = tuple[int, list[tuple[int, int]]]

NAN = float("nan")
#: In place of a property: the one that the check is about, which names it.
OWN = "accuracy"
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
        # rows behind a chunk of prompts are nobody's
        queries = self.q.cpu()[: len(seen)].double().unflatten(1, groups)
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
        lists = visible_slots(self.kind, self.args, self.window_left)
        slots = len(self.k_cache)
        sizes = torch.tensor([len(some) for some in lists])
        rows = torch.arange(len(lists)).repeat_interleave(sizes)
        flat = torch.tensor([slot for some in lists for slot in some], dtype=torch.int64)
        return torch.bincount(rows * slots + flat, minlength=len(lists) * slots).view(-1, slots)


def visible_slots(kind: str, args: dict[str, Any], window_left: int = -1) -> list[list[int]]:
    """Visible slots of every query row of a case of this kind."""
    a = {name: value.tolist() for name, value in args.items() if isinstance(value, Tensor)}
    rows = {"tree": _tree_rows, "lists": _list_rows, "extend": _extend_rows}[kind](a)
    return [
        [slot for slot, at in keys if window_left < 0 or 0 <= pos - at <= window_left]
        for pos, keys in rows
    ]


def _tree_rows(a: dict[str, Any]) -> Iterator[Row]:
    for b, prefix in enumerate(a["seq_lens"]):
        row = a["req_to_token"][a["req_pool_indices"][b]][:prefix]
        tail = list(zip(a["tail_slots"][b], a["tail_positions"][b], strict=True))
        for pos, words in zip(a["positions"][b], a["tail_words"][b], strict=True):
            bits = [words[j // 64] >> (j % 64) & 1 for j in range(len(tail))]
            yield pos, [*zip(row, range(prefix), strict=True), *compress(tail, bits)]


def _extend_rows(a: dict[str, Any]) -> Iterator[Row]:
    for b, (begin, end) in enumerate(pairwise(a["qo_indptr"])):
        row, prefix = a["req_to_token"][a["req_pool_indices"][b]], a["seq_lens"][b]
        for pos in range(prefix, prefix + end - begin):
            yield pos, list(zip(row[: pos + 1], range(pos + 1), strict=True))


def _list_rows(a: dict[str, Any]) -> Iterator[Row]:
    """The query stands at its list's last key."""
    for begin, end in pairwise(a["kv_indptr"]):
        slots = a["kv_indices"][begin:end]
        yield len(slots) - 1, list(zip(slots, range(len(slots)), strict=True))


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
) -> None:
    """Hold ``case.out`` (and ``case.lse``) to the oracle's; rows without keys exactly.

    Raises
    ------
    ConformanceError
        Naming what is broken: outputs that were not written, NaN from unused memory, rows without
        keys, the lse, or else `OWN`.
    """
    allowed = tolerances or Tolerances()
    want, want_lse = expected
    # a device waits once, and is asked for nothing else
    written = case.out.cpu()
    got, missing = written.double(), unwritten(written).any(-1).any(-1).sum()
    require(not missing, f"{missing} of {len(got)} rows of out not written", "written outputs")
    lost = (~got.isfinite()).sum()
    require(not lost, f"{lost} values of out are not finite", "unused memory")
    blind = want_lse == -math.inf
    require(not got[blind].any(), "a row without keys must be 0", "rows without keys")
    slack = allowed.cap * case.logit_cap
    limit = (TOLERANCE | dict(allowed.out))[case.q.dtype]
    if case.kv_dtype is not None:
        limit = min(limit, QUANTISED)
    limit += slack
    error = (got - want).norm(dim=-1)
    scale = want.norm(dim=-1)
    total = error.norm() / scale.norm().clamp_min(1e-30)
    require(total <= limit, f"relative error {total:.2e} above {limit:.1e}")
    if not len(got):
        return
    floor = (scale.square().mean().sqrt()).clamp_min(1e-30)
    worst = (error / scale.clamp_min(floor)).max()
    require(worst <= 2.5 * limit, f"worst row {worst:.2e} above {2.5 * limit:.1e}")
    if lse:
        _check_lse(case, want_lse, allowed.lse + slack)


def _check_lse(case: Case, want: Tensor, limit: float) -> None:
    written, blind = case.lse.cpu(), want == -math.inf
    got, missing = written.double(), unwritten(written).any(-1).sum()
    require(not missing, f"{missing} of {len(got)} rows of lse not written", "written outputs")
    require((got[blind] == -math.inf).all(), "the lse must be -inf", "rows without keys")
    off = (got - want)[~blind].abs() / want[~blind].abs().clamp_min(1)
    # bf16 and fp16 rows: the logits are exact products, only their sum is rounded
    require(
        not off.numel() or off.max() <= limit,
        f"off by {off.max() if off.numel() else 0:.2e}, above {limit:.0e} (natural log)",
        "lse",
    )


def require(holds: object, detail: str, broken: str = OWN) -> None:
    """Raise a `ConformanceError` unless something holds."""
    if not holds:
        raise ConformanceError(broken, detail)
