"""The private names of SGLang that the plug-in uses, and tested releases."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Any

#: The command-line name of the backend.
NAME = "specattn"
#: The releases that the tests run with. Those between differ in what the plug-in uses.
OLD, NEW = (0, 5, 15), (0, 5, 23)

REGISTRY = "sglang.srt.layers.attention.attention_registry"
LATENT = "sglang.srt.models.deepseek_common.attention_backend_handler"
ADD_LATENT = "sglang.srt.model_executor.model_runner.add_mla_attention_backend"
HOOKS = "sglang.srt.plugins.hook_registry.HookRegistry"
WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
CREATE = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
ARGUMENTS = "sglang.srt.arg_groups.speculative_hook._handle_eagle_family"
EXTEND = (
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner"
)
DECODE = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
SPEC = "sglang.srt.runtime_context.get_spec"
SELECT = "sglang.srt.speculative.spec_utils.select_top_k_tokens"

#: What both releases must have, and the parameters that a call or a hook counts on.
NAMES: dict[str, tuple[str, ...]] = {
    f"{REGISTRY}.ATTENTION_BACKENDS": (),
    f"{REGISTRY}.register_attention_backend": ("name",),
    "sglang.srt.server_args.add_attention_backend_choices": (),
    f"{LATENT}.AttentionBackendRegistry.register": ("backend_name", "handler_func"),
    f"{LATENT}._dispatch_mla_subtype": ("attn", "forward_batch"),
    f"{HOOKS}.register": (),
    f"{HOOKS}._patched": (),
    "sglang.srt.speculative.eagle_utils.TreeMaskMode.QLEN_ONLY": (),
    "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool.translate_loc_from_full_to_swa": (),
    EXTEND: ("eagle_worker",),
    CREATE: ("backend_name", "backend_map", "error_template"),
    f"{WORKER}._capture_cuda_graphs": (),
    ARGUMENTS: ("server_args",),
    SELECT: ("i", "topk_p", "topk_index", "hidden_states", "scores", "topk"),
}
#: What one of them must have besides.
OF_RELEASE: dict[tuple[int, ...], dict[str, tuple[str, ...]]] = {
    OLD: {
        ADD_LATENT: ("backend_name",),
        f"{WORKER}.init_attention_backend": (),
        f"{DECODE}.execute": ("forward_batch",),
        f"{EXTEND}.execute": ("forward_batch",),
    },
    NEW: {
        SPEC: (),
        "sglang.srt.server_args.add_draft_attention_backend_choices": (),
        "sglang.srt.layers.attention.base_attn_backend.SharedReadEnds.POST_REPLAY": (),
        "sglang.srt.layers.attention.verify_mask.VerifyMask": ("buffer", "mode", "max_bs"),
    },
}


def num_draft_tokens(runner: Any) -> int:
    """Return how many nodes a tree has, 0 without speculation."""
    source = runner.server_args if release() == OLD else resolve_name(SPEC)()
    return source.speculative_num_draft_tokens or 0


def release() -> tuple[int, ...]:
    """Return the installed SGLang's release, e.g. ``(0, 5, 15)``."""
    numbers = version("sglang").split("+")[0].split(".")[:3]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in numbers)


def problems() -> list[str]:
    """Say why the plug-in does not fit the installed SGLang.

    Empty if it does."""
    have = release()
    if have not in OF_RELEASE:
        served = " or ".join(".".join(map(str, tested)) for tested in OF_RELEASE)
        return [f"SGLang must be {served}, got {'.'.join(map(str, have))}"]
    wanted = NAMES | OF_RELEASE[have]
    return [reason for path, takes in wanted.items() if (reason := _reason(path, takes))]


def _reason(path: str, takes: tuple[str, ...]) -> str:
    """Say what is wrong with a name of SGLang, or nothing."""
    try:
        found = resolve_name(path)
    except (ImportError, AttributeError) as error:
        return f"SGLang has no {path} ({error})"
    missing = set(takes) - set(inspect.signature(found).parameters) if takes else ()
    return f"{path} takes no {', '.join(sorted(missing))}" if missing else ""
