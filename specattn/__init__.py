"""specattn: exact speculative decoding over one paged attention core.

The names here are what generating and a loop of one's own need, each imported when it is first
used. Everything else is imported from its module, such as ``specattn.errors.CapacityError``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specattn.backends import available, choose_backend, register_backend
    from specattn.cache.external import ExternalTable
    from specattn.cache.kv_pool import KVPool
    from specattn.cache.slot_table import SlotTable
    from specattn.config import AttnConfig, SpecConfig
    from specattn.engine.engine import Engine
    from specattn.engine.policy import GoodputPolicy
    from specattn.engine.request import Request, RequestOutput
    from specattn.engine.serving import AsyncEngine
    from specattn.errors import SpecAttnError
    from specattn.integrations.transformers import generate
    from specattn.speculative.model import ModelSlot
    from specattn.speculative.prefill import Prefill, Prompt
    from specattn.speculative.sampling import SamplingBatch, SamplingParams
    from specattn.speculative.states import RequestStates, StateDims
    from specattn.speculative.step_decoder import PendingStep, StepDecoder

__version__ = "0.1.0"

_HOME_OF = {
    "AsyncEngine": "engine.serving",
    "AttnConfig": "config",
    "Engine": "engine.engine",
    "ExternalTable": "cache.external",
    "GoodputPolicy": "engine.policy",
    "KVPool": "cache.kv_pool",
    "ModelSlot": "speculative.model",
    "PendingStep": "speculative.step_decoder",
    "Prefill": "speculative.prefill",
    "Prompt": "speculative.prefill",
    "Request": "engine.request",
    "RequestOutput": "engine.request",
    "RequestStates": "speculative.states",
    "SamplingBatch": "speculative.sampling",
    "SamplingParams": "speculative.sampling",
    "SlotTable": "cache.slot_table",
    "SpecAttnError": "errors",
    "SpecConfig": "config",
    "StateDims": "speculative.states",
    "StepDecoder": "speculative.step_decoder",
    "available": "backends",
    "choose_backend": "backends",
    "generate": "integrations.transformers",
    "register_backend": "backends",
}

__all__ = [
    "AsyncEngine",
    "AttnConfig",
    "Engine",
    "ExternalTable",
    "GoodputPolicy",
    "KVPool",
    "ModelSlot",
    "PendingStep",
    "Prefill",
    "Prompt",
    "Request",
    "RequestOutput",
    "RequestStates",
    "SamplingBatch",
    "SamplingParams",
    "SlotTable",
    "SpecAttnError",
    "SpecConfig",
    "StateDims",
    "StepDecoder",
    "available",
    "choose_backend",
    "generate",
    "register_backend",
]


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'specattn' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specattn.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
