"""Absorbed multi-head latent attention in Triton, over one pool of latent rows.

DeepSeek-V2 (arXiv:2405.04434): queries carry the key projection, all heads read the same row per
token, and the row's latent part is the value, too. See docs/mla.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from specattn.backends.base import BoundAttention, Capabilities
from specattn.backends.triton_bound import (
    Scratch,
    TritonCsr,
    TritonTree,
    interpret,
    platform_reasons,
)
from specattn.cuda_graph.capture_guard import Settable
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specattn.config import AttnConfig
    from specattn.kernels.mla.tree import MlaAttention

# what the accumulator and the tiles in shared memory are sized for
MAX_RANK, MAX_ROPE = 512, 64


class TritonMlaBackend(Settable):
    """The library's own kernels for ``latent`` layers.

    Parameters
    ----------
    config : AttnConfig
        The layer geometry, ``latent``.
    device : torch.device
        A CUDA device, or the CPU (interpreter).
    """

    name: ClassVar[str] = "triton_mla"
    capabilities: ClassVar[Capabilities] = Capabilities(graphs=True, window=False, cap=False)

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        if device.type == "cpu":
            interpret()
        self.config = config
        self.device = device
        self._scratch = Scratch(device)

    @staticmethod
    def reasons(config: AttnConfig | None, device: torch.device) -> list[str]:
        """Name what stands in the way."""
        found = platform_reasons(config, device)
        return found if config is None else found + _geometry(config)

    def bind(self, plan: Plan) -> BoundAttention:
        """Bind to the plan's kind."""
        if isinstance(plan, AttnPlan):
            layout = plan.layout
            return TritonTree(plan, self._kernel(plan.batch, layout.q_len, layout.tail, csr=False))
        if isinstance(plan, CsrPlan):
            return TritonCsr(plan, self._kernel(len(plan.kv_indptr) - 1, 1, 0, csr=True))
        return MlaExtend(self.config, plan)

    def _kernel(self, batch: int, q_len: int, tail_len: int, *, csr: bool) -> MlaAttention:
        from specattn.kernels.mla.tree import MlaAttention, choose_mla_tile

        config = self.config
        shape: dict[str, Any] = {
            "batch": batch,
            "q_len": q_len,
            "num_qo_heads": config.num_qo_heads,
            "head_dim": config.head_dim,
            "v_head_dim": config.v_head_dim,
            "dtype": config.dtype,
            "device": self.device,
            "tile": choose_mla_tile(
                q_len * config.num_qo_heads,
                config.dtype,
                config.head_dim,
                config.v_head_dim,
                self.device,
            ),
        }
        size = MlaAttention.workspace_bytes(num_kv_heads=1, **shape)
        return MlaAttention(
            **shape,
            tail_len=tail_len,
            sm_scale=config.sm_scale,
            csr=csr,
            workspace=self._scratch.of(size),
        )


def _geometry(config: AttnConfig) -> list[str]:
    found = []
    if not config.latent:
        found.append("only latent layers are served (AttnConfig.latent)")
    if config.v_head_dim > MAX_RANK:
        found.append(f"v_head_dim is limited to {MAX_RANK}, got {config.v_head_dim}")
    rope = config.head_dim - config.v_head_dim
    if rope > MAX_ROPE:
        found.append(f"head_dim - v_head_dim is limited to {MAX_ROPE}, got {rope}")
    if config.window_left >= 0:
        found.append(f"window_left is not served, got {config.window_left}")
    if config.logit_cap:
        found.append(f"logit_cap is not served, got {config.logit_cap}")
    return found


@dataclass(frozen=True)
class MlaExtend(BoundAttention):
    """A ragged prompt extend, absorbed like the rest."""

    config: AttnConfig
    plan: ExtendPlan

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        from specattn.kernels.mla.extend import mla_extend

        plan = self.plan
        mla_extend(
            q,
            k_cache,
            v_cache,
            out,
            lse,
            qo_indptr=plan.qo_indptr,
            seq_lens=plan.seq_lens,
            req_pool_indices=plan.req_pool_indices,
            req_to_token=plan.req_to_token,
            max_q_len=plan.max_q_len,
            sm_scale=self.config.sm_scale,
        )
