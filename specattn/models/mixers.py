"""Gated DeltaNet modules of transformers, whose mixing the caller supplies.

Such a module projects tokens, mixes them along their text, norms the result and projects it back.
Its mixing (a short convolution, then the gated delta rule) is the ``mix`` of the callable that the
model was called with, as attention is that callable itself.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from specattn.config import StateConfig
from specattn.errors import ModelError
from specattn.kernels.gated_delta import LayerParts, LayerWeights

if TYPE_CHECKING:
    from torch import Tensor, nn

#: The classes, by name: not every release of transformers has each.
MIXERS = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen3NextGatedDeltaNet")
#: Projections of what is mixed, under their names in a module; the others' rows are interleaved.
PLAIN = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
INTERLEAVED = ("in_proj_qkvz", "in_proj_ba")


def mixers_of(model: nn.Module) -> list[Any]:
    """Return the modules of a model that mix so, in its order."""
    return [one for one in model.modules() if is_mixer(one)]


def is_mixer(module: nn.Module) -> bool:
    """Return whether a module mixes so."""
    kind = type(module)
    return kind.__name__ in MIXERS and kind.__module__.startswith("transformers.")


def state_config(module: Any, dtype: torch.dtype, config: Any) -> StateConfig:
    """Return what a module keeps of requests.

    States are float32, unless the model's ``config`` says bfloat16 (``mamba_ssm_dtype``).

    Raises
    ------
    ValueError
        If its numbers describe no layer that is served.
    """
    asked = str(getattr(config, "mamba_ssm_dtype", None))
    return StateConfig(
        num_k_heads=module.num_k_heads,
        num_v_heads=module.num_v_heads,
        head_k_dim=module.head_k_dim,
        head_v_dim=module.head_v_dim,
        conv_width=module.conv_kernel_size,
        dtype=dtype,
        state_dtype=torch.bfloat16 if "bfloat16" in asked else torch.float32,
    )


def layer_weights(module: Any) -> LayerWeights:
    """Return what a module mixes by, beside its projections."""
    return LayerWeights(module.conv1d.weight[:, 0], module.A_log, module.dt_bias)


def names_of(module: Any) -> tuple[str, ...]:
    """Return the names of what projects, in their order."""
    return PLAIN if hasattr(module, PLAIN[0]) else INTERLEAVED


def widths_of(module: Any) -> tuple[int, int, int, int]:
    """Return how wide queries to values, z, b and a are."""
    heads = module.num_v_heads
    return 2 * module.key_dim + module.value_dim, module.value_dim, heads, heads


def columns_of(module: Any) -> Tensor | None:
    """Return the order of the columns of all projections.

    In it, queries, keys, values and z of all heads come first, then b and a. None stands for the
    order that they have. Qwen3-Next puts what belongs to a key head side by side.
    """
    if names_of(module) is PLAIN:
        return None
    heads, group = module.num_k_heads, module.num_v_heads // module.num_k_heads
    k, v = module.head_k_dim, group * module.head_v_dim
    device = module.in_proj_ba.weight.device
    wide = torch.arange(heads * (2 * k + 2 * v), device=device).view(heads, -1)
    narrow = torch.arange(2 * heads * group, device=device).view(heads, -1) + wide.numel()
    parts = (*wide.split([k, k, v, v], 1), *narrow.split([group, group], 1))
    return torch.cat([part.flatten() for part in parts])


def supply_mixers(model: nn.Module) -> None:
    """Let the callable of a model's call mix for it.

    `ModelState.restore` takes that back.
    """
    for module in mixers_of(model):
        module.forward = partial(_forward, module, columns_of(module))


def restore_mixer(module: nn.Module, forward: Any) -> None:
    """Give a module the forward that it had; None is its class's."""
    if forward is not None:
        module.forward = forward
    elif "forward" in vars(module):
        del module.forward


# a compiled model leaves its graph here, as it does for attention
@torch.compiler.disable
def _forward(
    module: Any,
    columns: Tensor | None,
    hidden_states: Tensor,
    *_: Any,
    specattn_attention: Any = None,
    **__: Any,
) -> Tensor:
    """Compute a module's forward; the callable of the model's call mixes."""
    if specattn_attention is None:
        raise ModelError(
            "target",
            f"this model ({type(module).__name__}) mixes tokens through specattn while an HFTarget "
            "has it; HFTarget.restore gives it its own forward back",
        )
    found = torch.cat([getattr(module, name)(hidden_states[0]) for name in names_of(module)], -1)
    if columns is not None:
        found = found[:, columns]
    qkv, z, b, a = found.split(widths_of(module), -1)
    parts = LayerParts(qkv[None], b[None], a[None])
    out = specattn_attention.mix(module, parts, layer_weights(module))  # [T, HV, V]
    normed: Tensor = module.norm(out.flatten(0, 1), z.reshape(-1, out.shape[-1]))
    projected: Tensor = module.out_proj(normed.reshape(1, len(out), -1))
    return projected
