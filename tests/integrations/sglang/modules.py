"""SGLang's model modules on a CPU, with random weights, and their forwards beside fused ones."""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import dp_attention
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.server_args import set_global_server_args_for_scheduler
from sglang.srt.speculative.eagle_info import EagleDraftInput
from transformers import AutoConfig

from specattn import AttnConfig
from specattn.config import FLOAT8
from specattn.integrations.sglang import names
from tests.models.conftest import TINY, DenseAttend

CLASSES = {
    "llama": "llama.LlamaForCausalLM",
    "mistral": "mistral.MistralForCausalLM",
    "qwen2": "qwen2.Qwen2ForCausalLM",
    "qwen3": "qwen3.Qwen3ForCausalLM",
    "qwen3_moe": "qwen3_moe.Qwen3MoeForCausalLM",
    "gemma3_text": "gemma3_causal.Gemma3ForCausalLM",
    "eagle3": "llama_eagle3.LlamaForCausalLMEagle3",
    "dflash": "dflash.DFlashDraftModel",
}
# what float8 weights of around 100 are multiplied by
SMALLER = 6e-4


def start(rank: int = 0, ranks: int = 1) -> None:
    """Make this process one of SGLang's ranks, as its schedulers are."""
    if parallel_state.model_parallel_is_initialized():
        return
    where = f"file://{Path(tempfile.mkdtemp()) / 'ranks'}"
    old = names.release() == names.OLD
    if old:
        kit = import_module("sglang.test.kits.attention_unittest.mock_server_args")
        arguments = kit.make_mock_server_args(device="cpu", tp_size=ranks)
        set_global_server_args_for_scheduler(arguments)
    parallel_state.init_distributed_environment(ranks, rank, where, rank, "gloo")
    if not old:
        publish = import_module("sglang.test.test_utils").publish_build_topology
        publish(world_rank=rank, device="cpu", tp_size=ranks)
    # newer releases read the size from what is published
    sizes = {"tensor_model_parallel_size": ranks} if old else {}
    parallel_state.initialize_model_parallel(**sizes, backend="gloo")
    if old:  # Qwen3's layers ask for it
        config = SimpleNamespace(hf_config=None, hidden_size=64, dtype=torch.float32)
        dp_attention.initialize_dp_attention(arguments, config)


def build(kind: str, dtype: torch.dtype, quantised: Any = None, **changes: Any) -> Any:
    """Return one of SGLang's models, no weight of it 0 or 1.

    ``quantised`` is SGLang's configuration of quantised weights.
    """
    start()
    settings = TINY | {"head_dim": 16, "draft_vocab_size": None} | changes
    config = AutoConfig.for_model(
        {"eagle3": "llama", "dflash": "qwen3"}.get(kind, kind), **settings
    )
    generator, usual = torch.Generator().manual_seed(0), torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        model = resolve_name(f"sglang.srt.models.{CLASSES[kind]}")(config, quant_config=quantised)
    finally:
        torch.set_default_dtype(usual)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            around = 1.0 if name.endswith("norm.weight") or "fc_norm" in name else 0.0
            # the scales of keys and values are numbers
            spread = parameter.shape[-1] ** -0.5 if parameter.dim() else 0.0
            if parameter.dtype == FLOAT8:
                noise, spread = noise.clamp(-4, 4), 100
            elif "weight_scale" in name:
                # no two are alike, and all weights together are as large as others
                noise, spread = 1 + noise.clamp(-2, 2) / 4, SMALLER
            parameter.copy_(around + noise * spread)
            parameter.requires_grad_(False)
    return model.eval()


def geometry(model: Any, dtype: torch.dtype) -> tuple[AttnConfig, ...]:
    """Return the attention geometry of every layer."""
    found = (layer.self_attn.attn for layer in getattr(model, "model", model).layers)
    return tuple(
        AttnConfig(
            one.tp_q_head_num,
            one.tp_k_head_num,
            one.head_dim,
            dtype=dtype,
            sm_scale=one.scaling,
            window_left=one.sliding_window_size,
        )
        for one in found
    )


class Dense(AttentionBackend):
    """What SGLang's layers call: dense attention over all that was stored."""

    def __init__(self, attend: DenseAttend) -> None:
        super().__init__()
        self.attend = attend
        # some models ask whether it is of a kind that their kernels store into
        self.token_to_kv_pool = None

    def forward(self, q: Any, k: Any, v: Any, layer: Any, *_: Any, **options: Any) -> torch.Tensor:
        config = self.attend.layers[layer.layer_id]
        counts = config.num_qo_heads, config.num_kv_heads, config.num_kv_heads
        heads = (
            x.reshape(-1, count, config.head_dim).contiguous()
            for x, count in zip((q, k, v), counts, strict=True)
        )
        return self.attend(layer.layer_id, *heads).flatten(1)


@torch.no_grad()
def run(
    model: Any,
    layers: tuple[AttnConfig, ...],
    ids: torch.Tensor,
    positions: torch.Tensor,
    *,
    hidden_states: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run SGLang's own forward; return logits and hidden states of all tokens."""
    drafts = hidden_states is not None
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE if drafts else ForwardMode.TARGET_VERIFY,
        batch_size=len(ids),
        input_ids=ids,
        req_pool_indices=torch.zeros(len(ids), dtype=torch.int64),
        seq_lens=positions + 1,
        out_cache_loc=torch.arange(len(ids)),
        seq_lens_sum=None,
        positions=positions,
        spec_info=EagleDraftInput(hidden_states=hidden_states) if drafts else None,
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    backend = Dense(DenseAttend(layers).at(positions))
    with forward_context(ForwardContext(attn_backend=backend)):
        out = model.forward(ids, positions, batch)
    return out.next_token_logits, out.hidden_states


@torch.no_grad()
def run_block(
    model: Any, layers: tuple[AttnConfig, ...], positions: torch.Tensor, embeds: torch.Tensor
) -> torch.Tensor:
    """Run SGLang's own forward of a DFlash head; return the states of all tokens."""
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=1,
        input_ids=None,
        req_pool_indices=torch.zeros(1, dtype=torch.int64),
        seq_lens=positions[-1:] + 1,
        out_cache_loc=torch.arange(len(positions)),
        seq_lens_sum=None,
        positions=positions,
    )
    backend = Dense(DenseAttend(layers).at(positions))
    with forward_context(ForwardContext(attn_backend=backend)):
        return model.forward(None, positions, batch, input_embeds=embeds).hidden_states
