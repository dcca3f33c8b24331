"""A whole attention backend: a loop over the requests, in plain torch.

`docs/adding_a_backend.md` walks through it, and the conformance kit passes it. It imports specattn:
`pip install .` in the project's root comes first, or `PYTHONPATH=.` with only the dependencies.
"""

from __future__ import annotations

import torch

from specattn.backends.base import BoundAttention, Capabilities
from specattn.errors import UnsupportedError
from specattn.plan import AttnPlan, CsrPlan


class TinyBackend:
    """One layer geometry on one device."""

    name = "tiny"
    # lengths are read on the host, so no graph can record it; it knows no index lists
    capabilities = Capabilities(graphs=False, lists=False)

    def __init__(self, config, device):
        self.config = config

    @staticmethod
    def reasons(config, device):
        """Serve whatever torch serves."""
        return []

    def bind(self, plan):
        """Look at the plan's type, once: afterwards all is tensors."""
        if isinstance(plan, CsrPlan):
            raise UnsupportedError("backend 'tiny'", ["serves no index lists"])
        request = tree if isinstance(plan, AttnPlan) else prompt
        return BoundTiny(self.config, plan, request)


def tree(plan, b):
    """Return request b's query rows, key slots, both positions, and who sees what."""
    length, n = int(plan.seq_lens[b]), plan.layout.q_len
    tail = torch.arange(plan.layout.tail, device=plan.seq_lens.device)
    prefix = plan.req_to_token[plan.req_pool_indices[b], :length]
    bits = plan.tail_words[b][:, tail // 64] >> tail % 64 & 1  # [n, tail]
    seen = torch.cat([bits.new_ones(n, length), bits], 1) != 0
    before = torch.arange(length, device=tail.device)
    pos_k = torch.cat([before, plan.tail_positions[b]])
    slots = torch.cat([prefix, plan.tail_slots[b]])
    return slice(b * n, b * n + n), slots, plan.positions[b], pos_k, seen


def prompt(plan, b):
    """Return the same of a prompt: every slot is in the table, and causal is arithmetic."""
    first, last, length = *plan.qo_indptr[b : b + 2].tolist(), int(plan.seq_lens[b])
    pos_k = torch.arange(length + last - first, device=plan.seq_lens.device)
    slots, pos_q = plan.req_to_token[plan.req_pool_indices[b], : len(pos_k)], pos_k[length:]
    return slice(first, last), slots, pos_q, pos_k, pos_k <= pos_q[:, None]


class BoundTiny(BoundAttention):
    """Attention over one plan."""

    def __init__(self, config, plan, request):
        self.config, self.plan, self.request = config, plan, request

    def run(self, q, k_cache, v_cache, out, lse=None):
        """Attend, request by request."""
        c = self.config
        for b in range(len(self.plan.seq_lens)):
            rows, slots, pos_q, pos_k, seen = self.request(self.plan, b)
            if c.window_left >= 0:
                distance = pos_q[:, None] - pos_k
                seen = seen & (distance >= 0) & (distance <= c.window_left)
            used = slots[seen.any(0)].long()  # what nobody sees may be NaN
            k, v = (
                cache[used].float().repeat_interleave(c.num_qo_heads // c.num_kv_heads, 1)
                for cache in (k_cache, v_cache)
            )
            logits = torch.einsum("qhd,khd->hqk", q[rows].float(), k) * c.sm_scale
            if c.logit_cap:
                logits = c.logit_cap * torch.tanh(logits / c.logit_cap)
            logits = logits.masked_fill(~seen[:, seen.any(0)], float("-inf"))
            # a row without keys: 0, and lse -inf
            weights = logits.softmax(-1).nan_to_num(0)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
            if lse is not None:
                lse[rows] = logits.logsumexp(-1).T
