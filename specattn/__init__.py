"""specattn: exact speculative decoding over one paged attention core.

The names here are the public API; models and transformers are imported only with
``specattn.models``, kernels only when a backend needs them.
"""

from specattn.backends import available, backend_names, choose_backend
from specattn.backends.multi_step import MultiStepDraftBackend
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
from specattn.config import AttnConfig, SpecConfig
from specattn.errors import (
    CapacityError,
    CaptureMismatch,
    ModelError,
    NotCapturedError,
    SpecAttnError,
    TreeError,
    UnsupportedError,
)
from specattn.graph import GraphRunner
from specattn.kv import KVPool, SlotTable
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, MultiStepPlan
from specattn.spec.decoder import ModelSlot, SpecDecoder, StepResult
from specattn.spec.generate import Engine, Generation, Request
from specattn.spec.sampling import SamplingBatch, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "AcceptResult",
    "AttnConfig",
    "AttnPlan",
    "BufferSet",
    "Candidates",
    "CapacityError",
    "CaptureMismatch",
    "CsrPlan",
    "DraftState",
    "DraftTree",
    "Engine",
    "ExtendPlan",
    "ForwardMode",
    "Generation",
    "GraphRunner",
    "KVPool",
    "ModelError",
    "ModelSlot",
    "MultiStepDraftBackend",
    "MultiStepPlan",
    "NotCapturedError",
    "Request",
    "RowLayout",
    "SamplingBatch",
    "SamplingParams",
    "SlotTable",
    "SpecAttnError",
    "SpecBatch",
    "SpecConfig",
    "SpecDecoder",
    "StepResult",
    "TreeError",
    "UnsupportedError",
    "available",
    "backend_names",
    "buf",
    "choose_backend",
]
