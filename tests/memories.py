"""A memory of another kind: by row, of one text, as layers with a recurrent state have it."""

from __future__ import annotations

import torch

from specattn.attention.layers import LayeredBackend
from specattn.buffers import fingerprint
from specattn.cache.kv_pool import KVPool
from specattn.speculative.model import ModelSlot


class Sums(KVPool):
    """Keys and values, and by row a sum of a text's keys, half of it forgotten at each token."""

    def __init__(self, layers, num_slots, device, *, rows, **options) -> None:
        super().__init__(layers, num_slots, device, **options)
        self.sums = self.k.new_zeros(len(layers), rows, *self.k.shape[2:], dtype=torch.float32)

    @classmethod
    def over(cls, layers, table, **options) -> Sums:
        """As `memory_for` makes one."""
        slots, rows = table.num_pages * table.page_size, len(table.req_to_token)
        return cls(layers, slots, table.req_to_token.device, rows=rows, **options)

    def tensors(self):
        return super().tensors() | {"sums": self.sums}

    def by_row(self):
        return {"sums": self.sums}

    def fingerprint(self):
        return super().fingerprint() + fingerprint(sums=self.sums)

    def read(self, layer, plan, k) -> None:
        """Go on with the keys of prompts' pieces."""
        ends = plan.qo_indptr.tolist()
        for row, start, stop in zip(plan.req_pool_indices, ends, ends[1:], strict=False):
            for key in k[start:stop]:
                self.sums[layer, row] = self.sums[layer, row] / 2 + key

    def commit(self, tail_slots, accepted, rows=None, nodes=None) -> None:
        for nodes in self.path(accepted).unbind(1):
            slots = tail_slots.gather(1, nodes.clamp(min=0).long()[:, None])[:, 0]
            after = self.sums[:, rows] / 2 + self.k[:, slots.long()]
            goes_on = (nodes >= 0) & (rows > 0)
            self.sums[:, rows] = torch.where(goes_on[:, None, None], after, self.sums[:, rows])
        super().commit(tail_slots, accepted)

    def path(self, accepted):
        """The nodes that count, ``[B, N + 1]``."""
        return accepted.accept_index


class Reading(LayeredBackend):
    """Attention that shows prompts' keys to the sums, too."""

    def bind_prompts(self, plan, prefix_lens):
        bound = super().bind_prompts(plan, prefix_lens)

        def attend(layer, q, k, v):
            self.pool.read(layer, plan, k)
            return bound(layer, q, k, v)

        return attend


def slot_of(model, table, memory=Sums, kind=ModelSlot) -> ModelSlot:
    """A target with sums, of the classes that a test wants."""
    pool = memory.over(model.layers, table)
    return kind(model, pool, Reading("torch_native", pool.layers, pool, pool.device))
