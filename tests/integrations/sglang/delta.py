"""Gated DeltaNet over prompts as SGLang's backend calls it, in torch, for a CPU.

The plug-in of tests puts these functions in place of SGLang's operators. They compute token by
token, so that what they leave is what one-token decoding would.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch.nn.functional import normalize, rms_norm, silu, softplus

#: Tokens of a chunk, after each of which SGLang's kernel keeps a state.
CHUNK = 64


def convolve(x, weight, bias=None, **options: Any):
    """Convolve prompts ``x [C, T]``, and leave their last inputs in ``conv_states``."""
    starts, slots = options["query_start_loc"].tolist(), options["cache_indices"].tolist()
    known, states, out = options["has_initial_state"], options["conv_states"], x.clone()
    for at, slot in enumerate(slots):
        piece, width = x[:, starts[at] : starts[at + 1]], weight.shape[1]
        before = states[slot] if known[at] else torch.zeros_like(states[slot])
        whole = torch.cat([before.to(x.dtype), piece], 1)
        taken = whole.unfold(1, width, 1)  # [C, T, width]
        out[:, starts[at] : starts[at + 1]] = silu((taken * weight[:, None]).sum(-1))
        states[slot] = whole[:, whole.shape[1] - width + 1 :]
    return out


def gates(a_log, a, b, dt_bias):
    """Return the logs of gates, and betas, ``[1, T, HV]``."""
    g = -a_log.float().exp() * softplus(a.float() + dt_bias)
    return g[None], b.float().sigmoid()[None]


def rule(*, q, k, v, g, beta, initial_state, cu_seqlens, initial_state_indices, **options: Any):
    """Apply the delta rule to prompts, ``[1, T, heads, size]``, in place of their states."""
    heads = v.shape[2]
    q, k = (
        normalize(one[0].float(), dim=-1, eps=1e-6).repeat_interleave(heads // one.shape[2], 1)
        for one in (q, k)
    )
    q, starts, out = q * q.shape[-1] ** -0.5, cu_seqlens.tolist(), torch.empty_like(v)
    chunks = []  # states where chunks begin
    for at, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].float()  # [HV, V, K]
        for token in range(starts[at], starts[at + 1]):
            if (token - starts[at]) % CHUNK == 0:
                chunks.append(state)
            state = state * g[0, token].exp()[:, None, None]
            seen = (state * k[token][:, None]).sum(-1)
            given = (v[0, token].float() - seen) * beta[0, token][:, None]
            state = state + given[..., None] * k[token][:, None]
            out[0, token] = (state * q[token][:, None]).sum(-1).to(out.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return out, None, torch.stack(chunks)[None]


def norm_heads(q, k, q_weight, k_weight, eps, size):
    """Norm queries and keys ``[T, heads * size]``, head by head."""
    return tuple(
        rms_norm(x.unflatten(-1, (-1, size)), [size], 1 + weight, eps)
        for x, weight in ((q, q_weight), (k, k_weight))
    )


def prepare(self, positions, hidden_states):
    """Return queries, keys, values and gates by the module's own path for other devices."""
    return self.forward_prepare_native(positions=positions, hidden_states=hidden_states)


def gate(x, gates, inplace=True):
    """Gate what attention gives."""
    return x * gates.reshape(x.shape).sigmoid()


def supply() -> None:
    """Put the functions where SGLang's modules look for them."""
    from tests.integrations.sglang import operators  # noqa: F401 - names that are looked up

    room = "sglang.srt.layers.attention.linear"
    backend = import_module(f"{room}.gdn_backend")
    backend.causal_conv1d_fn, backend.fused_gdn_gating = convolve, gates
    import_module(f"{room}.kernels.gdn_triton").chunk_gated_delta_rule = rule
    models = import_module("sglang.srt.models.qwen3_5")
    models.fused_qk_gemma_rmsnorm, models.fused_sigmoid_mul = norm_heads, gate
    models.Qwen3_5AttentionDecoderLayer.forward_prepare_fused_gate = prepare
    norms = import_module("sglang.srt.layers.attention.fla.layernorm_gated")
    norms._get_sm_count = lambda device: 1
    # it wants a device that has the kernels
    arguments = import_module("sglang.srt.server_args").ServerArgs
    arguments._validate_mamba_extra_buffer = lambda *args: None
