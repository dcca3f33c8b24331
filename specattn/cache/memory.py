"""What a model's layers keep of requests between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from specattn.cache.hybrid_pool import HybridPool
from specattn.cache.kv_pool import KVPool
from specattn.config import StateConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from specattn.batch import AcceptResult
    from specattn.buffers import Fingerprint
    from specattn.cache.external import RequestTable
    from specattn.cache.kv_pool import Caches
    from specattn.config import KVScales, LayerConfig
    from specattn.kernels.gated_delta import Nodes


class Memory(Protocol):
    """What a model's layers keep of requests between steps.

    It lies *by slot*, where a token has a place of its own, or *by row*, where a request has one
    for its whole text. What lies by slot past a text is never read, so that a step may fail or be
    run again, and texts may share a prefix. What lies by row is that of one text. Slot 0 and row 0
    belong to padding.
    """

    @property
    def layers(self) -> tuple[LayerConfig, ...]:
        """The model's layers, in its order."""

    @property
    def num_slots(self) -> int:
        """Tokens that it can hold, slot 0 included."""

    @property
    def device(self) -> torch.device:
        """Where it lives."""

    def tensors(self) -> Mapping[str, Caches]:
        """Return by name all that it keeps: a replay compares the addresses."""

    def by_row(self) -> Mapping[str, Tensor]:
        """Return what of it lies by row, each ``[layers, rows, ...]``.

        Of a request whose prompt begins, it holds zeros.
        """

    def fingerprint(self) -> Fingerprint:
        """Describe what graphs bake in, tensors and settings."""

    def nodes(self, batch: int, count: int) -> Nodes | None:
        """Allocate what ``count`` nodes of ``batch`` requests leave for `commit`, if anything.

        It is a step's own: static buffers that outlive no step, and that what runs side by side
        does not share.
        """

    def commit(
        self,
        tail_slots: Tensor,
        accepted: AcceptResult,
        rows: Tensor,
        nodes: Nodes | None = None,
    ) -> None:
        """Go on to the end of the accepted path: no sync, capturable.

        It holds of each request then what plain decoding over the kept tokens would have left.
        Every step calls it once, those of plain decoding too.

        Parameters
        ----------
        tail_slots : Tensor
            ``[B, n]`` int32, the slots that verification wrote, node by node.
        accepted : AcceptResult
            The nodes to keep.
        rows : Tensor
            ``[B]`` int64, the requests' rows; 0 for padding, and for who sits the step out.
        nodes : Nodes, optional
            What verification left in those of `nodes`, if there are any.
        """


def memory_for(
    layers: Sequence[LayerConfig],
    table: RequestTable,
    *,
    kv_dtype: torch.dtype | None = None,
    scales: Sequence[KVScales] | None = None,
) -> Memory:
    """Make what a model's layers keep of a table's requests.

    Parameters
    ----------
    layers : sequence of AttnConfig or StateConfig
        The model's.
    table : RequestTable
        Whose slots it has, and whose rows, on its device.
    kv_dtype, scales : optional
        As in `KVPool`.

    Returns
    -------
    Memory
        A `KVPool`, or a `HybridPool` if there are layers with states.

    Raises
    ------
    ValueError
        From `KVPool` and `HybridPool`.
    """
    slots, device = table.num_pages * table.page_size, table.req_to_token.device
    attending = [layer for layer in layers if not isinstance(layer, StateConfig)]
    if len(attending) == len(layers):
        return KVPool(attending, slots, device, kv_dtype=kv_dtype, scales=scales)
    rows = len(table.req_to_token)
    return HybridPool(layers, slots, device, rows=rows, kv_dtype=kv_dtype, scales=scales)
