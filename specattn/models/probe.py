"""Find out what attention a Hugging Face model computes.

The probe runs four tokens through the model. The first forward shows the geometry of every layer.
In it transformers builds the masks of the model's own attention, which tell each layer's window at
any distance. The second forward has the same tokens in another order, with their positions: a model
that can be served computes the same queries, keys and values for each of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from specattn.autocast import without_autocast
from specattn.config import AttnConfig
from specattn.errors import ModelError
from specattn.models.hub import first_line, quiet
from specattn.models.interface import INTERFACE, dispatch
from specattn.models.mixers import mixers_of, state_config, supply_mixers
from specattn.models.shards import own, process_group

if TYPE_CHECKING:
    from collections.abc import Callable

    from specattn.config import LayerConfig, StateConfig
    from specattn.kernels.gated_delta import LayerParts, LayerWeights

# The interface, with masks. Serving has none: with a mask function of its name, transformers looks
# at the positions on the host before every forward to find packed sequences.
_WITH_MASKS = "specattn_probe"

# The attribute of its masks that has what transformers would have computed them from.
_FUNCTION = "specattn_mask_function"
# Modules of `torch.ao.quantization.quantize_dynamic`.
_QUANTISED = "torch.ao.nn.quantized"
_KINDS = {"full_attention", "sliding_attention", "linear_attention"}
_SCAN = "which need a scan over trees of their own"
_MAMBA = "Mamba, which needs a scan over trees of its own (there is one for Gated DeltaNet)"
# Recurrent and convolutional layers that are not served, by a part of their class's name, and what
# they would need.
_OTHERS = {
    "DeltaAttention": "Kimi Delta Attention, whose gate per key dimension the solve over trees of "
    "Gated DeltaNet layers does not have",
    # Mamba, Bamba, Jamba, Zamba
    "amba": _MAMBA,
    "FalconH1Mixer": _MAMBA,
    "LightningAttention": "Lightning Attention, which needs a scan over trees of its own",
    "ShortConv": "short convolutions, which need a memory of windows alone, without states",
    "Rglru": "RG-LRU, which needs a scan over trees of its own",
    "GatedDeltaNet": "Gated DeltaNet in another form than Qwen3-Next's and Qwen3.5's",
}
# Tensors a layer may pass along that do not change what attention computes.
_HARMLESS = {"position_ids", "cache_position"}
# What transformers calls the sinks of a layer's heads, a logit each.
_SINKS = "s_aux"
_NO_INTERFACE = "does not use transformers' attention interface"
_ORDER = (2, 0, 3, 1)
# Relative L2 distance of the two forwards, by bytes of an element.
_CLOSE = {2: 2e-2, 4: 1e-4, 8: 1e-8}


class RecurrentModelError(ModelError):
    """A model has layers with states or windows that are not served."""


class _UnfitError(Exception):
    """What a model computes that paged attention over flattened tokens does not."""

    blame: type[ModelError] = ModelError


class _RecurrentError(_UnfitError):
    """Which layers a model has that keep states or windows."""

    blame = RecurrentModelError


def probe_layers(module: Any) -> tuple[LayerConfig, ...]:
    """Return what every layer is, in the order of ``layer_idx``.

    From then on, the model's attention is the ``specattn_attention`` of its call, and what mixes in
    its Gated DeltaNet layers that one's ``mix``. A ModelError names what it computes that paged
    attention over flattened tokens does not.
    """
    config = module.config.get_text_config(decoder=True)
    try:
        return _layers_of(module, config)
    except _UnfitError as error:
        message = f"unsupported: model type {config.model_type!r} {error}"
        raise error.blame("target", message) from error.__cause__


def _layers_of(module: Any, config: Any) -> tuple[LayerConfig, ...]:
    _check_config(module, config)
    supply_mixers(module)
    order = torch.tensor(_ORDER, device=next(module.parameters()).device)
    # Padding tokens may have positions of their own.
    tokens = (order.sort().values + 1 + (config.pad_token_id or 0)) % config.vocab_size  # [T]
    first = _run(module, config, _WITH_MASKS, input_ids=tokens[None])
    layers = first.layers()
    moved = {"input_ids": tokens[order][None], "position_ids": order[None]}
    second = _run(module, config, INTERFACE, **moved)
    for index in range(len(layers)):
        for one, other in zip(first.heads[index], second.heads[index], strict=True):
            if not _close(one[:, :, order], other):
                if not (one.isfinite().all() and other.isfinite().all()):
                    raise _not_finite(module, f"heads in layer {index}")
                raise _UnfitError(
                    f"computes other heads in layer {index} for tokens in another order with "
                    "their positions: it counts positions in its own way, or mixes tokens"
                )
    return layers


@without_autocast
def _run(module: Any, config: Any, interface: str, **inputs: Tensor) -> _Probe:
    """Run the model with a new probe as its attention; return that."""
    probe = _Probe(config)
    try:
        # Dynamo would trace the mask functions, and drop what they come from
        with quiet(), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            module.set_attn_implementation(interface)
            logits = module(**inputs, use_cache=False, specattn_attention=probe).logits
    except _UnfitError:
        raise
    # of the interface: a layer asked for a probe that did not reach it
    except ModelError as error:
        raise _UnfitError("does not pass the arguments of its call on to its attention") from error
    # Any of hundreds of model classes may run here.
    except Exception as error:
        uses_it = probe.heads or module._supports_attention_backend
        reason = f"cannot run over flattened tokens: {first_line(error)}"
        raise _UnfitError(reason if uses_it else _NO_INTERFACE) from error
    if not probe.heads:
        raise _UnfitError(_NO_INTERFACE)
    head = module.get_output_embeddings()
    if head is None or logits.shape[-1] != head.weight.shape[0]:
        raise _UnfitError(
            f"has logits of {logits.shape[-1]} columns, which are not its output embedding's"
        )
    # some models say by -inf what they never choose
    if not (logits < torch.inf).all():
        raise _not_finite(module, "logits")
    return probe


def _not_finite(module: nn.Module, what: str) -> _UnfitError:
    """Return the error for results that are no numbers."""
    names = [
        name
        for name, weight in module.named_parameters()
        if weight.is_floating_point() and not own(weight).float().isfinite().all()
    ]
    if not names:
        return _UnfitError(f"computes {what} that are NaN or infinite, of finite weights")
    more = f" and {len(names) - 1} more" if names[1:] else ""
    return _UnfitError(f"has weights that are NaN or infinite: {names[0]}{more}")


def _close(one: Tensor, other: Tensor) -> bool:
    error = (one.double() - other.double()).norm()
    return bool(error <= _CLOSE[one.element_size()] * one.double().norm())


def _check_config(module: nn.Module, config: Any) -> None:
    """Refuse what the calls of a probe do not show."""
    if config.is_encoder_decoder:
        raise _UnfitError("is an encoder-decoder; only decoders are supported")
    _check_recurrent(module, config)
    for name, part in module.named_modules():
        if type(part).__module__.startswith(_QUANTISED):
            raise _UnfitError(
                f"has {name} quantised by torch.ao, which rounds a token by the others of a forward"
            )
    kinds = set(getattr(config, "layer_types", None) or ()) - _KINDS
    if kinds:
        raise _UnfitError(f"has layers of kind {', '.join(sorted(kinds))}")


def _check_recurrent(module: nn.Module, config: Any) -> None:
    """Refuse layers with a state, but for those that `mixers_of` finds."""
    known = mixers_of(module)
    for name, needs in _OTHERS.items():
        found = (type(one).__name__ for one in module.modules() if one not in known)
        if any(name in kind and "Norm" not in kind for kind in found):
            raise _RecurrentError(f"has layers of {needs}")
    # Set on every class with recurrent (state-space, linear-attention) layers.
    kinds = getattr(config, "layer_types", None) or ()
    if module._is_stateful and kinds.count("linear_attention") != len(known):
        raise _RecurrentError(f"has recurrent layers other than Gated DeltaNet, {_SCAN}")
    if module._is_stateful and not known:
        raise _RecurrentError(f"has recurrent layers, {_SCAN} (there is one for Gated DeltaNet)")
    if known and process_group(module) is not None:
        raise _UnfitError("has Gated DeltaNet layers, which ranks cannot share")
    if any(one.activation != "silu" for one in known):
        raise _UnfitError(f"has convolutions with {known[0].activation}, not with silu")


class _Probe:
    """A stand-in for attention that records the layers of a forward."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._layers: dict[int, LayerConfig] = {}
        #: Queries, keys and values of every layer, ``[1, heads, T, D]``; of one that mixes, what is
        #: mixed and its gates, as one head.
        self.heads: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **asked: Any
    ) -> Tensor:
        index = module.layer_idx
        if index in self.heads:
            raise _UnfitError(f"runs attention layer {index} twice")
        self.heads[index] = query, key, value
        self._refuse(module, query.shape[1], asked)
        try:
            self._layers[index] = AttnConfig(
                num_qo_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=key.shape[-1],
                v_head_dim=value.shape[-1],
                dtype=query.dtype,
                sm_scale=float(asked.get("scaling") or 0.0),
                window_left=self._window(index, mask, asked.get("sliding_window")) - 1,
                logit_cap=float(asked.get("softcap") or 0.0),
                sinks=asked.get(_SINKS) is not None,
            )
        except ValueError as error:
            raise _UnfitError(f"in layer {index}: {error}") from error
        # Any function of a token's own heads would do.
        out = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return out.transpose(1, 2).contiguous()

    def mix(self, module: Any, parts: LayerParts, _: LayerWeights) -> Tensor:
        """Stand in for mixing, and record the layer."""
        index, (qkv,) = module.layer_idx, parts.qkv
        self.heads[index] = parts.qkv[None], parts.b[None], parts.a[None]
        try:
            config: StateConfig = state_config(module, qkv.dtype, self._config)
        except ValueError as error:
            raise _UnfitError(f"in layer {index}: {error}") from error
        self._layers[index] = config
        # Any function of a token's own values would do.
        shape = config.num_v_heads, config.head_v_dim
        values: Tensor = qkv[:, 2 * module.key_dim :].unflatten(-1, shape)
        return values

    def layers(self) -> tuple[LayerConfig, ...]:
        """Return what was seen, unless no one pool holds it (Gemma 4)."""
        wanted = self._config.num_hidden_layers
        if sorted(self._layers) != list(range(wanted)):
            raise _UnfitError(f"has attention in layers {sorted(self._layers)} of {wanted} only")
        layers = tuple(self._layers[index] for index in range(wanted))
        heads = {
            index: f"{layer.num_kv_heads} of {layer.head_dim}"
            + (f" (values of {layer.v_head_dim})" if layer.v_head_dim != layer.head_dim else "")
            for index, layer in enumerate(layers)
            if isinstance(layer, AttnConfig)
        }
        if not heads:
            raise _UnfitError("has no attention layer")
        first = min(heads)
        for index, found in heads.items():
            if found != heads[first]:
                raise _UnfitError(
                    f"has KV heads of several shapes, which one pool cannot hold: {heads[first]} "
                    f"in layer {first}, {found} in layer {index}"
                )
        return layers

    def _refuse(self, module: Any, heads: int, asked: dict[str, Any]) -> None:
        """Refuse whatever would change the result and is not in `AttnConfig`."""
        causal, sinks = asked.get("is_causal"), asked.get(_SINKS)
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise _UnfitError("has bidirectional attention; it is no causal LM")
        for name, value in asked.items():
            if isinstance(value, Tensor) and name not in {_SINKS, *_HARMLESS}:
                raise _UnfitError(f"gives attention an argument {name!r}")
        if sinks is None or (isinstance(sinks, nn.Parameter) and sinks.shape == (heads,)):
            return
        raise _UnfitError(
            f"gives attention layer {module.layer_idx} sinks ({_SINKS!r}) that are no parameter of "
            f"{heads} numbers, one per head"
        )

    def _window(self, index: int, mask: Any, asked: int | None) -> int:
        """Return the layer's Hugging Face window, 0 if it has none.

        The mask decides where there is one: layers of some models (Qwen2-MoE, PhiMoE) do not say
        their window, or say one that only others have.
        """
        if mask is None:
            return asked or 0
        if (function := getattr(mask, _FUNCTION, None)) is None:
            raise _UnfitError(f"gives attention layer {index} its own mask")
        window = _window_of(function, self._config.max_position_embeddings, mask.device)
        if window is None:
            raise _UnfitError(f"has a mask in layer {index} that is no causal window")
        return window


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Tensor],
    device: torch.device,
    **_: Any,
) -> Tensor:
    """Stand in for a mask, and keep what it comes from."""
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device)
    setattr(mask, _FUNCTION, mask_function)
    return mask


def _window_of(
    mask_function: Callable[..., Tensor], length: int, device: torch.device
) -> int | None:
    """Return a causal mask's window, 0 for none within ``length``, else None."""
    keys = torch.arange(length + 2, device=device)
    zero, window = keys.new_zeros(()), length + 2
    # The last row tells the window. It must be that of the row before it, which it is not where a
    # mask goes by chunks, and of the first ones, which see tokens after them where it has a prefix.
    for query in (length, length - 1, 1, 0):
        try:
            seen = mask_function(zero, zero, keys[query], keys).expand(len(keys)).nonzero()[:, 0]
        # A mask function may be any code; some are made for the tokens at hand alone.
        except Exception:
            return None
        if query == length and len(seen) <= query:
            window = len(seen)
        if not torch.equal(seen, keys[max(0, query + 1 - window) : query + 1]):
            return None
    return window if window <= length else 0


AttentionInterface.register(_WITH_MASKS, dispatch)
AttentionMaskInterface.register(_WITH_MASKS, _mask)
