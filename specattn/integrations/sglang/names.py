"""The private names of SGLang that the plug-in uses, and tested releases."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Any

#: The command-line names of the backend and of the algorithm.
NAME, ALGORITHM = "specattn", "SPECATTN"
#: What the algorithm becomes where the draft is an EAGLE or MTP (NEXTN) head.
EAGLE = "SPECATTN_EAGLE"
#: What it becomes where the draft is a DFlash head.
DFLASH = "SPECATTN_DFLASH"
#: All names of the algorithm.
STEPS = (ALGORITHM, EAGLE, DFLASH)
#: The releases that the tests run with. Those between differ in what the plug-in uses.
OLD, NEW = (0, 5, 15), (0, 5, 23)

LATENT = "sglang.srt.models.deepseek_common.attention_backend_handler"
ADD_LATENT = "sglang.srt.model_executor.model_runner.add_mla_attention_backend"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
SPECULATIVE, MANAGERS = "sglang.srt.speculative", "sglang.srt.managers"
WORKER = f"{SPECULATIVE}.eagle_worker_v2.EagleDraftWorker"
STEP_WORKER = f"{SPECULATIVE}.eagle_worker_v2.EAGLEWorkerV2"
CREATE = f"{SPECULATIVE}.draft_utils.DraftBackendFactory._create_backend"
SELECT = f"{SPECULATIVE}.spec_utils.select_top_k_tokens"
EXTEND = f"{SPECULATIVE}.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner"
ARGUMENTS = "sglang.srt.arg_groups.speculative_hook._handle_eagle_family"
DECODE = "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
SPEC = "sglang.srt.runtime_context.get_spec"
MAP = f"{MANAGERS}.overlap_utils.FutureMap"
RECURRENT = "sglang.srt.configs.hybrid_arch.mambaish_config"
WEIGHTS = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
#: What changes weights that have been loaded, at its end.
OLD_UPDATES = tuple(
    f"{RUNNER}.update_weights_from_{way}" for way in ("disk", "distributed", "tensor", "ipc")
)
NEW_UPDATES = tuple(
    f"{WEIGHTS}.{name}"
    for name in ("update_weights_from_disk", "update_weights_from_ipc", "end_weight_update")
)
STATES = "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool"

# Listed is what would be missed in silence, as hooks and methods that are replaced are, or what few
# requests need. What is missing elsewhere ends the start, with SGLang's first request, by itself.
#: What both releases must have, and the parameters that a call or a hook counts on.
NAMES: dict[str, tuple[str, ...]] = {
    f"{LATENT}.AttentionBackendRegistry.register": ("backend_name", "handler_func"),
    f"{LATENT}._dispatch_mla_subtype": ("attn", "forward_batch"),
    "sglang.srt.plugins.hook_registry.HookRegistry.register": (),
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
        f"{STATES}.__init__": ("speculative_num_draft_tokens",),
        f"{RUNNER}.handle_max_mamba_cache": ("total_rest_memory",),
        **dict.fromkeys(OLD_UPDATES, ()),
    },
    NEW: {
        **dict.fromkeys(NEW_UPDATES, ()),
        SPEC: (),
        "sglang.srt.layers.attention.base_attn_backend.SharedReadEnds.POST_REPLAY": (),
        "sglang.srt.layers.attention.verify_mask.VerifyMask": ("buffer", "mode", "max_bs"),
    },
}
#: What both releases must have for the algorithm.
STEP_NAMES: dict[str, tuple[str, ...]] = {
    # with all that it imports
    "specattn.integrations.sglang.worker:SpecAttnWorker": (),
    f"{SPECULATIVE}.spec_info.SpeculativeAlgorithm.register": ("supports_overlap", "spec_class"),
    f"{SPECULATIVE}.spec_registry.CustomSpecAlgo.create_worker": ("server_args",),
    f"{SPECULATIVE}.spec_registry.CustomSpecAlgo.handle_server_args": ("server_args",),
    f"{SPECULATIVE}.spec_info.SpeculativeAlgorithm.create_future_map": (
        "device",
        "req_to_token_pool",
    ),
    f"{SPECULATIVE}.spec_info.SpeculativeAlgorithm.need_topk": (),
    f"{SPECULATIVE}.spec_info.SpeculativeAlgorithm.carries_draft_hidden_states": (),
    f"{STEP_WORKER}.forward_batch_generation": ("batch", "on_publish"),
    f"{STEP_WORKER}.init_cuda_graphs": (),
    f"{STEP_WORKER}.on_verify_complete_cpu": ("num_correct_drafts_per_req", "batch_size"),
    f"{STEP_WORKER}.spec_v2_attn_backends": (),
    f"{WORKER}.init_attention_backend": (),
    f"{WORKER}.init_attention_backends": (),
    f"{WORKER}.init_lm_head": (),
    f"{WORKER}.init_cuda_graphs": (),
    f"{WORKER}._draft_extend_for_prefill": ("batch", "target_hidden_states"),
    f"{MAP}.resolve_seq_lens_cpu": ("batch",),
    f"{MAP}._resolve_spec_extras": ("batch",),
    f"{MAP}.publish": ("future_indices", "new_seq_lens"),
    f"{MAP}.stash": ("future_indices", "payload"),
    f"{MANAGERS}.schedule_batch.FINISH_ABORT": ("message", "status_code", "err_type"),
    f"{MANAGERS}.schedule_batch.ReqLogprob": ("top_logprobs_num", "token_ids_logprob"),
    f"{RUNNER}.init_cuda_graphs": ("capture_decode_cuda_graph",),
    f"{RUNNER}.sample": ("logits_output", "forward_batch"),
    "sglang.srt.environ.envs.SGLANG_RETURN_ORIGINAL_LOGPROB": (),
}


def num_draft_tokens(runner: Any) -> int:
    """Return how many nodes a tree has, 0 without speculation."""
    return _options(runner).speculative_num_draft_tokens or 0


def block_size(runner: Any) -> int:
    """Return how many tokens a DFlash head's block has."""
    size: int = _options(runner).speculative_dflash_block_size
    return size


def recurrent(runner: Any) -> Any:
    """Return the settings of a model with recurrent layers, else None."""
    if release() == OLD:
        return runner.mambaish_config
    return resolve_name(RECURRENT)(runner.model_config)


def _options(runner: Any) -> Any:
    """Return what has the options of speculation."""
    return runner.server_args if release() == OLD else resolve_name(SPEC)()


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
    return _reasons(NAMES | OF_RELEASE[have])


def step_problems() -> list[str]:
    """Say why the algorithm does not fit the installed SGLang.

    Empty if it does."""
    return problems() or _reasons(STEP_NAMES)


def _reasons(wanted: dict[str, tuple[str, ...]]) -> list[str]:
    """Say what is wrong with names of SGLang."""
    return [reason for path, takes in wanted.items() if (reason := _reason(path, takes))]


def _reason(path: str, takes: tuple[str, ...]) -> str:
    """Say what is wrong with a name of SGLang, or nothing."""
    try:
        found = resolve_name(path)
    except (ImportError, AttributeError) as error:
        return f"{path} does not load ({error})"
    missing = set(takes) - set(inspect.signature(found).parameters) if takes else ()
    return f"{path} takes no {', '.join(sorted(missing))}" if missing else ""
