"""Who takes part: specattn's kernels and those of other libraries, behind one protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .fa3 import Fa3, Fa3Ahead, Fa3Tree
from .flashinfer import FlashInferCascade, FlashInferCausal, FlashInferDecode, FlashInferMask
from .latent import Fa3Latent, FlashInferMla, FlashMla
from .ours import Ours, OursAuto, OursPrompt
from .xqa import Xqa

if TYPE_CHECKING:
    from ..cases import Case
    from .base import Contestant

PEERS: tuple[type[Contestant], ...] = (
    Fa3,
    Fa3Ahead,
    Fa3Tree,
    Fa3Latent,
    FlashMla,
    FlashInferMask,
    FlashInferCausal,
    FlashInferDecode,
    FlashInferCascade,
    Xqa,
    FlashInferMla,
)


def own(case: Case) -> type[Contestant]:
    """Return specattn's way to compute a case."""
    if case.auto and case.mode in ("prompt", "chain"):
        return OursAuto
    return OursPrompt if case.mode == "prompt" else Ours
