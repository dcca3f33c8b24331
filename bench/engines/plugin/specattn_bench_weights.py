"""A plug-in of SGLang for benches: dummy float8 weights that are random numbers.

SGLang's own are within a thousandth of 0, where e4m3 has next to nothing but zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# what is stored, and what a weight is then: as much as SGLang's dummy weights of 16 bits
STORED, SPREAD = 100.0, 6e-4
SCALES = ("weight_scale", "weight_scale_inv")
# rows that are drawn at a time
ROWS = 4096


def register() -> None:
    """Hook SGLang's dummy weights; it calls this in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    dummies = "sglang.srt.model_loader.loader.initialize_dummy_weights"
    HookRegistry.register(dummies, fill, HookType.AROUND)


def fill(original: Callable[..., None], model: torch.nn.Module, *args: Any, **named: Any) -> None:
    """Let SGLang fill a model; then draw its float8 weights and set their scales."""
    original(model, *args, **named)
    draw(model)


@torch.no_grad()
def draw(model: torch.nn.Module) -> None:
    """Draw float8 weights, the same ones again."""
    for name, one in model.state_dict().items():
        if one.dtype == torch.float8_e4m3fn:
            generator = torch.Generator(one.device).manual_seed(0)
            for rows in one.split(ROWS):
                numbers = torch.empty(rows.shape, dtype=torch.bfloat16, device=one.device)
                numbers.normal_(std=STORED, generator=generator)
                rows.copy_(numbers.clamp_(-448, 448))
        elif name.endswith(SCALES):
            one.fill_(SPREAD / STORED)
