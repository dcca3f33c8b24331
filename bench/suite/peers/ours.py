"""specattn's own kernels."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from specattn.backends import choose_backend
from specattn.backends.base import attending
from specattn.batch import Phase, RowLayout
from specattn.config import AttnConfig, KVScales
from specattn.kernels.attention import DeterministicSplits, TreeAttention, extend_attention
from specattn.kernels.mla import MlaAttention
from specattn.plan import AttnPlan, ExtendPlan

from .base import Contestant, query_offsets

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import Batch


class Ours(Contestant):
    """The kernel of all modes but prompts: one plan per step and one call per layer.

    The deterministic mode has a workspace for the lengths at hand.
    """

    name = "specattn"
    packs = False

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        case = batch.case
        shared = _shared(batch)
        self.kernel: Any = (
            MlaAttention(**shared) if case.latent else TreeAttention(**shared, **self.options())
        )
        self.layer = self.kernel
        if case.stored:
            scales = KVScales(batch.kv_scale, batch.kv_scale)
            self.layer = self.kernel.for_layer(scales, prefetch=False)
        if batch.sinks is not None:
            self.layer = self.layer.with_sinks(batch.sinks)

    def options(self) -> dict[str, Any]:
        """Return what trees have besides their shape."""
        batch, case = self.batch, self.batch.case
        return {
            "page_size": case.page_size,
            "kv_dtype": batch.kv_dtype,
            "window_left": case.window_left,
            "logit_cap": case.logit_cap,
            "deterministic": DeterministicSplits(max(case.lengths)) if case.fixed else None,
        }

    def tails(self) -> dict[str, Tensor]:
        batch = self.batch
        return {
            "indices": batch.table,
            "positions": batch.positions,
            "tail_slots": batch.tails,
            "tail_positions": batch.tail_positions,
            "tail_words": batch.words,
        }

    def plan(self) -> None:
        batch = self.batch
        self.kernel.plan(batch.lens, batch.rows, batch.table.stride(0)).fill()
        if batch.case.fixed:
            self.kernel.trace(**self.tails())

    def run(self, pool: int) -> None:
        batch = self.batch
        self.layer.run(self.q, batch.k(pool), batch.v(pool), self.out, batch.lse, **self.tails())

    def result(self) -> tuple[Tensor, Tensor | None]:
        return self.out, self.batch.lse

    def detail(self) -> dict[str, Any]:
        return {"tile": asdict(self.kernel.tile), "splits": self.kernel.kernels.splits}


class OursAuto(Contestant):
    """What `auto` takes, called as an engine calls it."""

    name = "specattn"
    packs = False

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        case = batch.case
        config = AttnConfig(
            *case.heads,
            case.head_dim,
            case.v_dim,
            dtype=batch.dtype,
            sm_scale=batch.scale,
            latent=case.latent,
        )
        backend = choose_backend("auto", [config], batch.device)(config, batch.device)
        plan = prompts(batch) if case.mode == "prompt" else chains(batch)
        self.bound, self.taken = backend.bind(plan), attending(backend, plan)

    def plan(self) -> None:
        self.bound.fill()

    def run(self, pool: int) -> None:
        batch = self.batch
        self.out = self.bound.result(self.q, batch.k(pool), batch.v(pool), batch.lse)

    def detail(self) -> dict[str, Any]:
        return {"backend": getattr(self.taken, "name", "")}


def prompts(batch: Batch) -> ExtendPlan:
    """Return the plan of a batch of prompts."""
    case = batch.case
    return ExtendPlan(
        batch.table,
        batch.rows,
        batch.lens,
        query_offsets(batch),
        batch.tails.view(1, -1),
        max_q_len=case.q_len,
        max_seq_len=max(case.lengths) + case.q_len,
        page_size=case.page_size,
    )


def chains(batch: Batch) -> AttnPlan:
    """Return the plan of a batch of chains."""
    case = batch.case
    phase = Phase.DECODE if case.q_len == 1 else Phase.VERIFY
    return AttnPlan(
        RowLayout(case.q_len, case.tail, phase, causal=True, page_size=case.page_size),
        batch.table,
        batch.rows,
        batch.lens,
        batch.positions,
        batch.tails,
        batch.tail_positions,
        batch.words,
    )


def _shared(batch: Batch) -> dict[str, Any]:
    case = batch.case
    return {
        "batch": case.batch,
        "q_len": case.q_len,
        "tail_len": case.tail,
        "num_qo_heads": case.heads[0],
        "num_kv_heads": case.heads[1],
        "head_dim": case.head_dim,
        "v_head_dim": case.v_dim,
        "dtype": batch.dtype,
        "device": batch.device,
        "sm_scale": batch.scale,
    }


class OursPrompt(Contestant):
    """The prompt kernel, which needs no plan."""

    name = "specattn"
    packs = False

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.offsets = query_offsets(batch)

    def run(self, pool: int) -> None:
        batch, case = self.batch, self.batch.case
        extend_attention(
            self.q,
            batch.k(pool),
            batch.v(pool),
            self.out,
            batch.lse,
            qo_indptr=self.offsets,
            seq_lens=batch.lens,
            req_pool_indices=batch.rows,
            req_to_token=batch.table,
            max_q_len=case.q_len,
            sm_scale=batch.scale,
            window_left=case.window_left,
            logit_cap=case.logit_cap,
            page_size=case.page_size,
            k_scale=batch.kv_scale,
            v_scale=batch.kv_scale,
            sinks=batch.sinks,
        )
