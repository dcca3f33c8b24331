"""SGLang's layers and pools as specattn's, and what is refused at start."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

from specattn.attention import Attention, AttnConfig, KVScales, WindowPool
from specattn.config import StateConfig
from specattn.errors import UnsupportedError
from specattn.integrations.sglang.names import (
    ALGORITHM,
    DFLASH,
    EAGLE,
    NAME,
    OLD,
    recurrent,
    release,
)

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.attention import Layer

#: Names another backend of specattn, for tests and comparisons.
BACKEND_VARIABLE = "SPECATTN_SGLANG_BACKEND"
POOLS = ("MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool")
#: The pool of a model of which some layers have states.
HYBRID = "HybridLinearKVPool"
PAGE_SIZES = (1, 16, 32, 64, 128)
#: Layers whose tokens see what comes before; and, of a DFlash head's block, what follows.
KINDS = (AttentionType.DECODER,)
BLOCK_KINDS = (*KINDS, AttentionType.ENCODER_ONLY)
#: Models of texts whose layers are causal, whatever SGLang's kind of them allows.
CAUSAL = ("Gemma3ForCausalLM",)
ALGORITHMS = (None, "EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", ALGORITHM, EAGLE, DFLASH)


def refusals(
    runner: Any, pools: tuple[str, ...] = POOLS, kinds: tuple[AttentionType, ...] = KINDS
) -> list[str]:
    """Say what of SGLang's setting the plug-in does not serve.

    Parameters
    ----------
    runner : ModelRunner
        SGLang's, with its model and pools.
    pools : tuple of str
        The kinds of pools that are served.
    kinds : tuple of AttentionType
        What its layers may be.
    """
    args, found = runner.server_args, []
    kinds = (*kinds, *_own_kinds(runner))
    for pool in pools_of(runner):
        if type(pool).__name__ not in pools:
            found.append(f"KV pool {type(pool).__name__} (served: {', '.join(pools)})")
    if runner.page_size not in PAGE_SIZES:
        found.append(f"page_size {runner.page_size} (served: {', '.join(map(str, PAGE_SIZES))})")
    if args.speculative_algorithm not in ALGORITHMS:
        found.append(f"speculative_algorithm {args.speculative_algorithm}")
    for option in ("enable_multi_layer_eagle", "enable_deterministic_inference"):
        if getattr(args, option):
            found.append(option)
    for module in _modules(runner):
        if getattr(module, "sinks", None) is not None:
            found.append(f"attention sinks ({type(module).__name__})")
            break
    for layer in attention_layers(runner):
        found += layer_refusals(layer, kinds)
    return list(dict.fromkeys(found))


def _own_kinds(runner: Any) -> tuple[AttentionType, ...]:
    """Return further kinds whose tokens see what comes before, by model.

    SGLang 0.5.15 says of every Gemma 3 that it may see ahead.
    """
    model = getattr(runner, "model", None)
    config = getattr(model, "config", None)
    if type(model).__name__ not in CAUSAL or getattr(config, "use_bidirectional_attention", False):
        return ()
    return (AttentionType.DECODER_BIDIRECTIONAL,)


def pools_of(runner: Any) -> tuple[Any, ...]:
    """Return a model's pool, and of a hybrid's the keys and values."""
    pool = runner.token_to_kv_pool
    inner = getattr(pool, "full_kv_pool", None)
    return (pool,) if inner is None or type(pool).__name__ != HYBRID else (pool, inner)


def layer_refusals(layer: Any, kinds: tuple[AttentionType, ...] = KINDS) -> list[str]:
    """Say what of a layer the plug-in does not serve."""
    tests = {
        "cross attention": layer.is_cross_attention,
        f"attention type {layer.attn_type}": layer.attn_type not in kinds,
        "xai_temperature_len": layer.xai_temperature_len > 0,
        f"logit_capping_method {layer.logit_capping_method}": layer.logit_cap > 0
        and layer.logit_capping_method != "tanh",
    }
    return [name for name, refused in tests.items() if refused]


def _refuse(found: list[str]) -> None:
    if found:
        raise UnsupportedError(f"SGLang backend {NAME!r}", [f"not served: {x}" for x in found])


def _modules(runner: Any) -> list[Any]:
    # SGLang's test kit has no model
    model = getattr(runner, "model", None)
    return [] if model is None else list(model.modules())


def attention_layers(runner: Any) -> list[Any]:
    """Return the layers that attend, in the model's order.

    A layer of latent attention has a second one for expanded heads, over the same keys; the
    plug-in has SGLang attend in the absorbed form alone.
    """
    layers = [module for module in _modules(runner) if isinstance(module, RadixAttention)]
    if runner.use_mla_backend:
        layers = [layer for layer in layers if layer.tp_k_head_num == 1]
    return layers


def mixing_layers(runner: Any) -> list[Any]:
    """Return the layers that have a state, in the model's order."""
    return [module for module in _modules(runner) if isinstance(module, RadixLinearAttention)]


def model_layers(runner: Any) -> list[Any]:
    """Return the layers of both kinds, in the model's order."""
    return sorted([*attention_layers(runner), *mixing_layers(runner)], key=_place)


def _place(layer: Any) -> int:
    place: int = layer.layer_id
    return place


def backend_name() -> str:
    """Return the backend that the environment chooses."""
    return os.environ.get(BACKEND_VARIABLE, "auto")


def layer_config(runner: Any, layer: Any) -> AttnConfig:
    """Return the geometry of a layer's heads on this rank."""
    window = layer.sliding_window_size
    return AttnConfig(
        layer.tp_q_head_num,
        layer.tp_k_head_num,
        layer.qk_head_dim,
        layer.v_head_dim,
        dtype=runner.dtype,
        sm_scale=layer.scaling,
        window_left=-1 if window is None else window,
        logit_cap=layer.logit_cap,
        latent=runner.use_mla_backend,
    )


def state_config(runner: Any, layer: Any) -> StateConfig:
    """Return the geometry of a layer's states on this rank.

    Raises
    ------
    ValueError
        If its numbers describe no layer that is served.
    """
    held = runner.req_to_token_pool.mamba_pool.mamba_cache
    return StateConfig(
        layer.num_k_heads,
        layer.num_v_heads,
        layer.head_k_dim,
        layer.head_v_dim,
        conv_width=layer.conv_weights.shape[-1],
        dtype=held.conv[0].dtype,
        state_dtype=held.temporal.dtype,
    )


def config_of(runner: Any, layer: Any) -> AttnConfig | StateConfig:
    """Return the geometry of a layer of either kind."""
    if isinstance(layer, RadixLinearAttention):
        return state_config(runner, layer)
    return layer_config(runner, layer)


def state_refusals(runner: Any) -> list[str]:
    """Say what of layers with states a step does not serve."""
    layers, found = mixing_layers(runner), []
    other = recurrent(runner)
    if not layers:
        # a draft has no such layers, though its target may
        return [] if other is None or runner.is_draft_worker else [_unknown(other)]
    if release() != OLD:
        return [f"layers with states ({other.model_type}): SGLang 0.5.15 serves them"]
    if runner.hybrid_gdn_config is None:
        return [_unknown(other)]
    for layer in layers:
        if layer.num_q_heads != layer.num_k_heads or layer.head_q_dim != layer.head_k_dim:
            found.append("layers with states whose queries and keys have other heads")
        if layer.bias is not None or layer.activation not in ("silu", "swish"):
            found.append("short convolutions with a bias, or another activation than SiLU")
        try:
            state_config(runner, layer)
        except ValueError as error:
            found.append(f"layers with states: {error}")
    if runner.server_args.strip_thinking_cache:
        found.append("strip_thinking_cache: states are those of whole texts")
    kind, held = runner.dtype, runner.req_to_token_pool.mamba_pool.mamba_cache
    if held.conv[0].dtype != kind:
        found.append(
            f"windows of {held.conv[0].dtype} beside a model of {kind} "
            f"(SGLANG_MAMBA_CONV_DTYPE={str(kind).removeprefix('torch.')})"
        )
    if not (held.conv[0].is_contiguous() and held.temporal.is_contiguous()):
        found.append("states in pages (enable_page_major_kv_layout)")
    return list(dict.fromkeys(found))


def _unknown(config: Any) -> str:
    kind = getattr(config, "model_type", type(config).__name__)
    return f"layers with states other than Gated DeltaNet ({kind})"


def cached(runner: Any, layer: Any) -> tuple[AttnConfig, Tensor, Tensor | None, KVScales | None]:
    """Return a layer's geometry, its caches, and the scales of float8 ones."""
    pool, config = runner.token_to_kv_pool, layer_config(runner, layer)
    keys = pool.get_key_buffer(layer.layer_id)
    values = None if config.latent else pool.get_value_buffer(layer.layer_id)
    scales = None
    if keys.dtype == torch.float8_e4m3fn:
        scales = KVScales(layer.k_scale_float or 1.0, layer.v_scale_float or 1.0)
    return config, keys, values, scales


class Layers:
    """SGLang's layers over its pool and table.

    Parameters
    ----------
    runner : ModelRunner
        SGLang's, of a target or a draft.

    Raises
    ------
    UnsupportedError
        In one line, naming all that is not served.
    """

    def __init__(self, runner: Any) -> None:
        self._runner, self.page_size = runner, runner.page_size
        _refuse(refusals(runner))
        self._table = runner.req_to_token_pool.req_to_token
        self._known = attention_layers(runner)
        self._kinds = (*KINDS, *_own_kinds(runner))
        self._window = _window_pool(runner, self._known)
        self.resize(len(self._table))

    def resize(self, max_batch: int) -> None:
        """Make attention over batches of up to ``max_batch``, and all known layers."""
        self.attention = Attention(
            self._table, max_batch=max_batch, backend=backend_name(), window_pool=self._window
        )
        self._layers: dict[int, Layer] = {}
        for layer in self._known:
            self.of(layer)

    def of(self, layer: Any) -> Layer:
        """Return SGLang's ``layer`` as specattn's."""
        if layer.layer_id not in self._layers:
            self._layers[layer.layer_id] = self._made(layer)
        return self._layers[layer.layer_id]

    def _made(self, layer: Any) -> Layer:
        _refuse(layer_refusals(layer, self._kinds))
        pool = self._runner.token_to_kv_pool
        windowed = self._window is not None and pool.layers_mapping[layer.layer_id][1]
        return self.attention.layer(*cached(self._runner, layer), windowed=windowed)


def _window_pool(runner: Any, layers: list[Any]) -> WindowPool | None:
    """Return the pool that only sliding-window layers have, if any."""
    pool = runner.token_to_kv_pool
    if type(pool).__name__ != "SWAKVPool":
        return None
    lefts = [
        layer.sliding_window_size for layer in layers if pool.layers_mapping[layer.layer_id][1]
    ]
    slot_map = pool.full_to_swa_index_mapping
    return WindowPool(slot_map, max(lefts, default=runner.sliding_window_size or 0))
