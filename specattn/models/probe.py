"""What attention a Hugging Face model asks for, seen by running two tokens through it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specattn.config import AttnConfig
from specattn.errors import ModelError
from specattn.models.hub import first_line, quiet

if TYPE_CHECKING:
    from torch import nn

_KINDS = {"full_attention", "sliding_attention"}
# Tensors a layer may pass along that do not change what attention computes.
_HARMLESS = {"position_ids", "cache_position"}


def probe_layers(module: nn.Module, config: Any) -> tuple[AttnConfig, ...]:
    """Return every attention layer's geometry, in the order of ``layer_idx``.

    Parameters
    ----------
    module : nn.Module
        A causal language model that dispatches its attention to the ``specattn`` interface.
    config : PretrainedConfig
        The configuration of its text part.

    Raises
    ------
    ModelError
        Naming what it computes that paged attention over flattened tokens does not.
    """
    _check_config(module, config)
    probe = _Probe(config)
    tokens = torch.arange(2, device=next(module.parameters()).device)[None]  # [1, 2]
    try:
        with quiet(), torch.no_grad():
            module(input_ids=tokens, position_ids=tokens, use_cache=False, specattn_attention=probe)
    except ModelError:
        raise
    # Any of hundreds of model classes may run here.
    except Exception as error:
        raise _unsupported(config, f"cannot run over flattened tokens: {first_line(error)}") from (
            error
        )
    return probe.layers()


def _check_config(module: nn.Module, config: Any) -> None:
    """Refuse what the calls of a probe do not show."""
    if config.is_encoder_decoder:
        raise _unsupported(config, "is an encoder-decoder; only decoders are supported")
    # Set on every class with recurrent (state-space, linear-attention) layers.
    if module._is_stateful:
        raise _unsupported(config, "has recurrent layers, whose state cannot be rolled back")
    kinds = set(getattr(config, "layer_types", None) or ()) - _KINDS
    if kinds:
        raise _unsupported(config, f"has layers of kind {', '.join(sorted(kinds))}")


def _unsupported(config: Any, reason: str) -> ModelError:
    return ModelError("target", f"unsupported: model type {config.model_type!r} {reason}")


class _Probe:
    """Takes the place of attention once, and writes down what each layer asks for."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._layers: dict[int, AttnConfig] = {}

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **asked: Any
    ) -> Tensor:
        index = module.layer_idx
        if index in self._layers:
            raise _unsupported(self._config, f"runs attention layer {index} twice")
        self._refuse(module, index, mask, asked)
        try:
            self._layers[index] = AttnConfig(
                num_qo_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=key.shape[-1],
                v_head_dim=value.shape[-1],
                dtype=query.dtype,
                sm_scale=float(asked.get("scaling") or 0.0),
                window_left=self._window(index, asked.get("sliding_window")) - 1,
                logit_cap=float(asked.get("softcap") or 0.0),
            )
        except ValueError as error:
            raise _unsupported(self._config, f"in layer {index}: {error}") from error
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

    def layers(self) -> tuple[AttnConfig, ...]:
        """Return what was seen, once all layers were."""
        wanted = self._config.num_hidden_layers
        if not self._layers:
            raise _unsupported(self._config, "does not use transformers' attention interface")
        if sorted(self._layers) != list(range(wanted)):
            raise _unsupported(
                self._config, f"has attention in layers {sorted(self._layers)} of {wanted} only"
            )
        return tuple(self._layers[index] for index in range(wanted))

    def _refuse(self, module: Any, index: int, mask: Any, asked: dict[str, Any]) -> None:
        """Refuse whatever would change the result and is not in `AttnConfig`."""
        if mask is not None:
            raise _unsupported(self._config, f"gives attention layer {index} its own mask")
        causal = asked.get("is_causal")
        if not (getattr(module, "is_causal", True) if causal is None else causal):
            raise _unsupported(self._config, "has bidirectional attention; it is no causal LM")
        for name, value in asked.items():
            if isinstance(value, Tensor) and name not in _HARMLESS:
                known = " (attention sinks)" if name == "s_aux" else ""
                raise _unsupported(self._config, f"gives attention an argument {name!r}{known}")

    def _window(self, index: int, asked: int | None) -> int:
        """Return the layer's window in Hugging Face's sense, 0 if it has none.

        The kind of a layer decides its mask in transformers, so it decides here; a layer of
        kind ``sliding_attention`` need not repeat the width in its call (Qwen2-MoE).
        """
        kinds = getattr(self._config, "layer_types", None)
        if kinds is None:
            return asked or 0
        if kinds[index] == "full_attention":
            return 0
        window = asked or self._config.sliding_window
        if not window:
            raise _unsupported(self._config, f"names no window for sliding layer {index}")
        return int(window)
