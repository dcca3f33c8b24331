"""What a backend is: reasons it cannot serve a configuration, and `bind`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specattn.config import AttnConfig
    from specattn.plan import Plan


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
    #: Whether a bound ``run`` may be recorded in a CUDA graph.
    graphs: ClassVar[bool]
    config: AttnConfig

    def __init__(self, config: AttnConfig, device: torch.device) -> None: ...

    @staticmethod
    def reasons(config: AttnConfig | None, device: torch.device) -> list[str]:
        """Say why this backend cannot serve ``config`` on ``device``; empty means it can.

        ``config=None`` asks about the device and the installed libraries alone.
        """

    def bind(self, plan: Plan) -> BoundAttention:
        """Return attention over the plan's tensors; the only place that looks at a plan's type."""
