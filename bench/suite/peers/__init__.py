"""Who takes part: specattn's kernels and those of other libraries, behind one protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .fa3 import Fa3, Fa3Ahead, Fa3Tree, Fa3TreeAhead
from .flashinfer import (
    FlashInferCascade,
    FlashInferCausal,
    FlashInferCausalGraph,
    FlashInferDecode,
    FlashInferMask,
    FlashInferMaskGraph,
)
from .latent import Fa3Latent, FlashInferMla, FlashMla
from .ours import Ours, OursAuto, OursFixed, OursPrompt
from .sglang import SglangDecode, SglangExtend
from .xqa import Xqa

if TYPE_CHECKING:
    from ..cases import Case
    from .base import Contestant

OURS: tuple[type[Contestant], ...] = (OursAuto, Ours, OursFixed, OursPrompt)
PEERS: tuple[type[Contestant], ...] = (
    Fa3,
    Fa3Ahead,
    Fa3Tree,
    Fa3TreeAhead,
    Fa3Latent,
    FlashMla,
    FlashInferMask,
    FlashInferMaskGraph,
    FlashInferCausal,
    FlashInferCausalGraph,
    FlashInferDecode,
    FlashInferCascade,
    Xqa,
    FlashInferMla,
    SglangExtend,
    SglangDecode,
)


def own(case: Case) -> type[Contestant]:
    """Return specattn's way to compute a case."""
    return next(kind for kind in OURS if kind.refuses(case) is None)
