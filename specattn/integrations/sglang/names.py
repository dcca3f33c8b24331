"""The private names of SGLang that the plug-in uses, and tested releases."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Any

#: The command-line name of the backend.
NAME = "specattn"
#: The releases that the tests run with. Those between differ in what the plug-in uses.
TESTED = (0, 5, 15), (0, 5, 23)

REGISTRY = "sglang.srt.layers.attention.attention_registry"
ADD_LATENT = "sglang.srt.model_executor.model_runner.add_mla_attention_backend"
WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
CREATE = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
ARGUMENTS = "sglang.srt.arg_groups.speculative_hook._handle_eagle_family"
RUNNERS = (
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.execute",
    "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner"
    ".EAGLEDraftExtendCudaGraphRunner.execute",
)
SPEC = "sglang.srt.runtime_context.get_spec"
SELECT = "sglang.srt.speculative.spec_utils.select_top_k_tokens"


@dataclass(frozen=True)
class Name:
    """One name of SGLang.

    Parameters
    ----------
    path : str
        Dotted, from the module on.
    takes : tuple of str
        Parameters that a call or a hook counts on.
    only : tuple of int, optional
        The one release of `TESTED` that has and needs it.
    """

    path: str
    takes: tuple[str, ...] = ()
    only: tuple[int, ...] = ()


#: What a release must have.
NAMES = (
    Name(f"{REGISTRY}.ATTENTION_BACKENDS"),
    Name(f"{REGISTRY}.register_attention_backend", ("name",)),
    Name("sglang.srt.server_args.ATTENTION_BACKEND_CHOICES"),
    Name("sglang.srt.server_args.add_attention_backend_choices"),
    Name(ADD_LATENT, ("backend_name",), only=(0, 5, 15)),
    Name(
        "sglang.srt.models.deepseek_common.attention_backend_handler"
        ".AttentionBackendRegistry.register",
        ("backend_name", "handler_func"),
    ),
    Name(
        "sglang.srt.models.deepseek_common.attention_backend_handler._dispatch_mla_subtype",
        ("attn", "forward_batch"),
    ),
    Name("sglang.srt.plugins.hook_registry.HookRegistry.register"),
    Name("sglang.srt.plugins.hook_registry.HookRegistry._patched"),
    Name("sglang.srt.speculative.eagle_utils.TreeMaskMode.QLEN_ONLY"),
    Name(
        "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner"
        ".EAGLEDraftExtendCudaGraphRunner",
        ("eagle_worker",),
    ),
    Name("sglang.srt.mem_cache.swa_memory_pool.SWAKVPool.translate_loc_from_full_to_swa"),
    Name(SPEC, only=(0, 5, 23)),
    Name(
        "sglang.srt.layers.attention.base_attn_backend.SharedReadEnds.POST_REPLAY", only=(0, 5, 23)
    ),
    *(Name(path, ("forward_batch",), only=(0, 5, 15)) for path in RUNNERS),
    Name(CREATE, ("backend_name", "backend_map", "error_template")),
    Name(f"{WORKER}.init_attention_backend"),
    Name(f"{WORKER}._capture_cuda_graphs"),
    Name(ARGUMENTS, ("server_args",)),
    Name(SELECT, ("i", "topk_p", "topk_index", "hidden_states", "scores", "topk")),
)


def num_draft_tokens(runner: Any) -> int:
    """Return how many nodes a tree has, 0 without speculation."""
    source = runner.server_args if release() == TESTED[0] else resolve_name(SPEC)()
    return source.speculative_num_draft_tokens or 0


def release() -> tuple[int, ...]:
    """Return the installed SGLang's release, e.g. ``(0, 5, 15)``."""
    numbers = version("sglang").split("+")[0].split(".")[:3]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in numbers)


def problems() -> list[str]:
    """Say why the plug-in does not fit the installed SGLang.

    Empty if it does."""
    have = release()
    if have not in TESTED:
        served = " or ".join(".".join(map(str, tested)) for tested in TESTED)
        return [f"SGLang must be {served}, got {'.'.join(map(str, have))}"]
    return [reason for name in NAMES if name.only in ((), have) and (reason := _reason(name))]


def _reason(name: Name) -> str:
    """Say what is wrong with a name of SGLang, or nothing."""
    try:
        found = resolve_name(name.path)
    except (ImportError, AttributeError) as error:
        return f"SGLang has no {name.path} ({error})"
    if not name.takes:
        return ""
    missing = set(name.takes) - set(inspect.signature(found).parameters)
    return f"{name.path} takes no {', '.join(sorted(missing))}" if missing else ""
