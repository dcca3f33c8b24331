"""specattn: exact speculative decoding over one paged attention core.

The names here are what generating and a loop of one's own need, each imported when it is first
used. Everything else is imported from its module, such as ``specattn.errors.CapacityError``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# `as` tells type checkers that the names are meant for others, too
if TYPE_CHECKING:
    from specattn.backends import available as available
    from specattn.backends import choose_backend as choose_backend
    from specattn.backends import register_backend as register_backend
    from specattn.cache.external import ExternalTable as ExternalTable
    from specattn.cache.kv_pool import KVPool as KVPool
    from specattn.cache.slot_table import SlotTable as SlotTable
    from specattn.config import AttnConfig as AttnConfig
    from specattn.config import SpecConfig as SpecConfig
    from specattn.engine.engine import Engine as Engine
    from specattn.engine.policy import GoodputPolicy as GoodputPolicy
    from specattn.engine.request import Request as Request
    from specattn.engine.request import RequestOutput as RequestOutput
    from specattn.engine.serving import AsyncEngine as AsyncEngine
    from specattn.errors import SpecAttnError as SpecAttnError
    from specattn.integrations.transformers import generate as generate
    from specattn.speculative.model import ModelSlot as ModelSlot
    from specattn.speculative.prompts.prefill import Prefill as Prefill
    from specattn.speculative.prompts.prompt import Prompt as Prompt
    from specattn.speculative.sampling.params import SamplingBatch as SamplingBatch
    from specattn.speculative.sampling.params import SamplingParams as SamplingParams
    from specattn.speculative.states import RequestStates as RequestStates
    from specattn.speculative.step.decoder import PendingStep as PendingStep
    from specattn.speculative.step.decoder import StepDecoder as StepDecoder
    from specattn.speculative.step.setup import StepSetup as StepSetup

__version__ = "0.1.0"

_HOME_OF = {
    "AsyncEngine": "engine.serving",
    "AttnConfig": "config",
    "Engine": "engine.engine",
    "ExternalTable": "cache.external",
    "GoodputPolicy": "engine.policy",
    "KVPool": "cache.kv_pool",
    "ModelSlot": "speculative.model",
    "PendingStep": "speculative.step.decoder",
    "Prefill": "speculative.prompts.prefill",
    "Prompt": "speculative.prompts.prompt",
    "Request": "engine.request",
    "RequestOutput": "engine.request",
    "RequestStates": "speculative.states",
    "SamplingBatch": "speculative.sampling.params",
    "SamplingParams": "speculative.sampling.params",
    "SlotTable": "cache.slot_table",
    "SpecAttnError": "errors",
    "SpecConfig": "config",
    "StepDecoder": "speculative.step.decoder",
    "StepSetup": "speculative.step.setup",
    "available": "backends",
    "choose_backend": "backends",
    "generate": "integrations.transformers",
    "register_backend": "backends",
}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'specattn' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specattn.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
