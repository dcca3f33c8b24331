"""What a backend is: reasons it cannot serve a configuration, and `bind`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.config import AttnConfig
    from specattn.plan import Plan


@dataclass(frozen=True)
class Capabilities:
    """What a backend promises, as data: printed by ``specattn backends``, proven by tests.

    Parameters
    ----------
    graphs : bool
        A bound ``run`` (and ``fill``) may be recorded in a CUDA graph.
    host_plan : bool
        ``schedule`` plans on the host and needs ``seq_lens_cpu`` (Pattern B).
    trees : bool
        Any ancestor words; else only layouts that are causal by construction.
    lists : bool
        `CsrPlan` is served.
    extend : bool
        `ExtendPlan` (prompts) is served.
    window, cap, lse : bool
        ``window_left``, ``logit_cap``, and ``run`` with ``lse``.
    dtypes : tuple of torch.dtype
        Of q, k and v.
    """

    graphs: bool = False
    host_plan: bool = False
    trees: bool = True
    lists: bool = True
    extend: bool = True
    window: bool = True
    cap: bool = True
    lse: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)


class BoundAttention(Protocol):
    """Attention over one plan: ``fill`` and ``schedule`` once per step, ``run`` once per layer."""

    def fill(self) -> None:
        """Derive device metadata from the plan's tensors: no sync, capturable."""

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Plan on the host from ``[B]`` int32 prefix lengths; empty for Pattern A backends."""

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend.

        Parameters
        ----------
        q, out : Tensor
            ``[rows, num_qo_heads, head_dim]`` and the same with ``v_head_dim``, written in place;
            rows are the plan's query tokens, request by request.
        k_cache, v_cache : Tensor
            ``[num_slots, num_kv_heads, head_dim]`` / ``v_head_dim``; the plan's own slots are
            already written.
        lse : Tensor, optional
            ``[rows, num_qo_heads]`` float32, natural log-sum-exp of the visible logits, written
            in place. A row that sees no key gets output 0 and lse -inf.
        """


class AttentionBackend(Protocol):
    """A way to compute attention for one layer geometry on one device."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    config: AttnConfig

    def __init__(self, config: AttnConfig, device: torch.device) -> None: ...

    @staticmethod
    def reasons(config: AttnConfig | None, device: torch.device) -> list[str]:
        """Say why this backend cannot serve ``config`` on ``device``; empty means it can.

        ``config=None`` asks about the device and the installed libraries alone.
        """

    def bind(self, plan: Plan) -> BoundAttention:
        """Return attention over the plan's tensors; the only place that looks at a plan's type."""
