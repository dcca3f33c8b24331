"""specattn: exact speculative decoding over one paged attention core.

The names here are the public API, each imported when it is first used. Models and transformers
come with ``specattn.models``, kernels with the backend that needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specattn.backends import (
        available,
        backend_names,
        choose_backend,
        register_backend,
    )
    from specattn.backends.base import Capabilities
    from specattn.backends.hybrid import HybridBackend, hybrid
    from specattn.backends.layers import LayeredBackend
    from specattn.backends.multi_step import MultiStepDraftBackend
    from specattn.backends.tbo import TboBackend, tbo
    from specattn.batch import (
        AcceptResult,
        Candidates,
        DraftState,
        DraftTree,
        ForwardMode,
        RowLayout,
        SpecBatch,
    )
    from specattn.buffers import BufferSet, buf
    from specattn.cache.external import ExternalTable, as_slots, block_stride
    from specattn.cache.kv_pool import KVPool
    from specattn.cache.slot_table import SlotTable
    from specattn.config import AttnConfig, KVScales, SpecConfig
    from specattn.cuda_graph import GraphReport, GraphRunner
    from specattn.engine.engine import Engine
    from specattn.engine.policy import GoodputPolicy, Observed, Policy
    from specattn.engine.request import Request, RequestOutput
    from specattn.errors import (
        CapacityError,
        CaptureError,
        CaptureMismatch,
        ModelError,
        NotCapturedError,
        SpecAttnError,
        TreeError,
        UnsupportedError,
    )
    from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, MultiStepPlan
    from specattn.speculative.decoder import ModelSlot, SpecDecoder, StepResult
    from specattn.speculative.prefill import Prefill, Prompt
    from specattn.speculative.sampling import SamplingBatch, SamplingParams
    from specattn.speculative.states import RequestStates, StateDims
    from specattn.speculative.step_decoder import PendingStep, StepDecoder

__version__ = "0.1.0"

_HOMES = {
    "cache.external": ("ExternalTable", "as_slots", "block_stride"),
    "backends": ("available", "backend_names", "choose_backend", "register_backend"),
    "backends.base": ("Capabilities",),
    "backends.hybrid": ("HybridBackend", "hybrid"),
    "backends.layers": ("LayeredBackend",),
    "backends.multi_step": ("MultiStepDraftBackend",),
    "backends.tbo": ("TboBackend", "tbo"),
    "batch": (
        "AcceptResult",
        "Candidates",
        "DraftState",
        "DraftTree",
        "ForwardMode",
        "RowLayout",
        "SpecBatch",
    ),
    "buffers": ("BufferSet", "buf"),
    "config": ("AttnConfig", "KVScales", "SpecConfig"),
    "errors": (
        "CapacityError",
        "CaptureError",
        "CaptureMismatch",
        "ModelError",
        "NotCapturedError",
        "SpecAttnError",
        "TreeError",
        "UnsupportedError",
    ),
    "cuda_graph": ("GraphReport", "GraphRunner"),
    "cache.kv_pool": ("KVPool",),
    "plan": ("AttnPlan", "CsrPlan", "ExtendPlan", "MultiStepPlan"),
    "cache.slot_table": ("SlotTable",),
    "speculative.decoder": ("ModelSlot", "SpecDecoder", "StepResult"),
    "engine.engine": ("Engine",),
    "engine.policy": ("GoodputPolicy", "Observed", "Policy"),
    "speculative.prefill": ("Prefill", "Prompt"),
    "engine.request": ("RequestOutput", "Request"),
    "speculative.sampling": ("SamplingBatch", "SamplingParams"),
    "speculative.states": ("RequestStates", "StateDims"),
    "speculative.step_decoder": ("PendingStep", "StepDecoder"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AcceptResult",
    "AttnConfig",
    "AttnPlan",
    "BufferSet",
    "Candidates",
    "Capabilities",
    "CapacityError",
    "CaptureError",
    "CaptureMismatch",
    "CsrPlan",
    "DraftState",
    "DraftTree",
    "Engine",
    "ExtendPlan",
    "ExternalTable",
    "ForwardMode",
    "GoodputPolicy",
    "GraphReport",
    "GraphRunner",
    "HybridBackend",
    "KVPool",
    "KVScales",
    "LayeredBackend",
    "ModelError",
    "ModelSlot",
    "MultiStepDraftBackend",
    "MultiStepPlan",
    "NotCapturedError",
    "Observed",
    "PendingStep",
    "Policy",
    "Prefill",
    "Prompt",
    "Request",
    "RequestOutput",
    "RequestStates",
    "RowLayout",
    "SamplingBatch",
    "SamplingParams",
    "SlotTable",
    "SpecAttnError",
    "SpecBatch",
    "SpecConfig",
    "SpecDecoder",
    "StateDims",
    "StepDecoder",
    "StepResult",
    "TboBackend",
    "TreeError",
    "UnsupportedError",
    "as_slots",
    "available",
    "backend_names",
    "block_stride",
    "buf",
    "choose_backend",
    "hybrid",
    "register_backend",
    "tbo",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'specattn' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specattn.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
