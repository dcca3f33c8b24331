"""A backend bound once, and fed forwards as a graph's replays are."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specattn.config import AttnConfig, KVScales
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan
from specattn.testing.oracle import Case, Tolerances, check, head, require

if TYPE_CHECKING:
    from specattn.backends.base import AttentionBackend, BoundAttention

# all other tensors of a case have the batch first
_SHARED = ("req_to_token", "kv_indices", "k_cache", "v_cache", "sinks")
_STRIDED = {
    "positions": 1 << 40,
    "tail_slots": 1 << 30,
    "tail_positions": 1 << 40,
    "tail_words": -1,
}


def config_of(case: Case) -> AttnConfig:
    """Return the layer geometry of a case."""
    # short splits, so that short cases have several
    split = {"split_keys": 128} if case.deterministic else {}
    return AttnConfig(
        num_qo_heads=case.q.shape[1],
        num_kv_heads=case.k_cache.shape[1],
        head_dim=case.q.shape[2],
        v_head_dim=case.out.shape[2],
        dtype=case.q.dtype,
        latent=case.latent,
        kv_dtype=case.kv_dtype,
        deterministic=case.deterministic,
        sinks=case.sinks is not None,
        **split,
        **case.settings,
    )


def plan_of(case: Case) -> Plan:
    """Return the plan over a case's tensors."""
    if case.kind == "extend":
        a = dict(case.args)
        news = a["qo_indptr"].diff().tolist()
        # of chunks it is a context's
        a.setdefault("max_seq_len", max(map(sum, zip(case.prefix_lens, news, strict=True))))
        assert case.out_slots is not None
        return ExtendPlan(**a, out_slots=case.out_slots, page_size=case.page_size)
    assert case.layout is not None
    if case.kind == "lists":
        assert case.out_slots is not None
        return CsrPlan(case.layout, **case.args, out_slots=case.out_slots)
    return AttnPlan(case.layout, **case.args)


def _buffer(name: str, value: Tensor, strided: bool) -> Tensor:
    """Return a static buffer, with junk between rows if ``strided``."""
    if not strided or name not in _STRIDED:
        return torch.empty_like(value, memory_format=torch.contiguous_format)
    wide = value.new_full((len(value), value[0].numel() + 3), _STRIDED[name])
    return wide[:, :-3].view(value.shape)


class Session:
    """One bound plan over static buffers.

    Parameters
    ----------
    backend : AttentionBackend
        Of the case's geometry.
    case : Case
        Gives the shapes; cases that are loaded later have the same.
    tolerances : Tolerances
        How far results may be from the oracle.
    within : Session, optional
        A session of a larger bucket whose storage this one views (a smaller bucket of a graph).
    lse : bool
        Whether an lse that the backend offers is asked for.

    Raises
    ------
    UnsupportedError
        If the backend refuses the plan.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        case: Case,
        tolerances: Tolerances,
        within: Session | None = None,
        *,
        lse: bool = True,
    ) -> None:
        self.backend, self.tolerances = backend, tolerances
        self.lse = lse and backend.capabilities.lse
        strided = case.layout is not None and case.layout.tail > case.layout.q_len
        values = tensors_of(case)
        if within is None:
            self.buffers = {n: _buffer(n, v, strided) for n, v in values.items()}
        else:
            self.buffers = {
                n: b if n in _SHARED else b[: len(values[n])] for n, b in within.buffers.items()
            }
        if case.latent:
            self.buffers["v_cache"] = self.buffers["k_cache"][..., : case.v_cache.shape[2]]
        named: dict[str, Any] = {n: b for n, b in self.buffers.items() if n not in case.args}
        args = {n: self.buffers.get(n, value) for n, value in case.args.items()}
        self.live = replace(case, **named, args=args)
        self.load(case)
        self.plan = plan_of(self.live)
        self.bound = backend.bind(self.plan)
        self.layer: BoundAttention
        self.scale(case.kv_scales)

    def scale(self, kv_scales: tuple[float, float]) -> None:
        """Go on as a layer with these scales, over the same `fill`."""
        self.live.kv_scales = kv_scales
        scales = None if self.live.kv_dtype is None else KVScales(*kv_scales)
        self.layer = self.bound.for_layer(scales, prefetch=False)
        if self.live.sinks is not None:
            self.layer = self.layer.with_sinks(self.live.sinks)

    def load(self, case: Case) -> None:
        """Copy another forward into the buffers the backend is bound to."""
        for name, value in tensors_of(case).items():
            buffer = self.buffers[name]
            # a table or pool may have been made for a larger bucket
            (buffer[: len(value)] if name in _SHARED else buffer).copy_(value)
        self.live.prefix_lens, self.live.live = case.prefix_lens, case.live

    def schedule(self) -> None:
        """Hand over the host mirror of the lengths."""
        self.bound.schedule(torch.tensor(self.live.prefix_lens, dtype=torch.int32))

    def run(self) -> None:
        """Run over fresh outputs, with an lse if it is asked for."""
        live = self.live
        live.clear()
        lse = live.lse if self.lse else None
        self.layer.run(live.q, live.k_cache, live.v_cache, live.out, lse)

    def fill_and_run(self) -> None:
        """Do what a graph records."""
        self.bound.fill()
        self.run()

    def verdict(self, *, padding: bool = True) -> None:
        """Hold the outputs to the oracle; padding rows, if ``padding``, are finite.

        Raises
        ------
        ConformanceError
            Naming what is broken; see `check`.
        """
        case, expected = head(self.live, self.live.expected())
        check(case, expected, lse=self.lse, tolerances=self.tolerances)
        finite = self.live.out[case.live :].isfinite().all()
        require(finite or not padding, "padding rows of out are not finite", "padding")

    def forward(self, case: Case | None = None) -> None:
        """Load, schedule, fill, run, and judge."""
        if case is not None:
            self.load(case)
        self.schedule()
        self.fill_and_run()
        self.verdict()


def tensors_of(case: Case) -> dict[str, Tensor]:
    """Return every tensor a forward reads or writes, by name."""
    fields = vars(case) | case.args
    return {name: value for name, value in fields.items() if isinstance(value, Tensor)}
