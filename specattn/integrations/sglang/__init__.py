"""Both ways into SGLang: an attention backend, and a speculative algorithm.

``--attention-backend specattn`` gives SGLang this library's attention, and
``--speculative-algorithm SPECATTN`` whole steps. SGLang finds `register` by its entry point group
``sglang.srt.plugins``. Nothing needs to be imported.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from specattn.errors import UnsupportedError
from specattn.integrations.sglang import names

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["reasons", "register"]


def register() -> None:
    """Register backend, algorithm and hooks in one of SGLang's processes.

    In an SGLang that they do not fit, their names stay, and choosing one is an `UnsupportedError`
    with the reasons. SGLang itself would swallow an error here.
    """
    from sglang.srt import server_args
    from sglang.srt.layers.attention import attention_registry as registry
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if names.NAME in registry.ATTENTION_BACKENDS:
        return
    problems = names.problems()

    def make(runner: Any) -> Any:
        if problems:
            raise UnsupportedError(f"SGLang backend {names.NAME!r}", problems)
        from specattn.integrations.sglang.backend import SpecAttnBackend

        return SpecAttnBackend(runner)

    registry.register_attention_backend(names.NAME)(make)
    server_args.add_attention_backend_choices([names.NAME])
    # newer releases have a list of their own for drafts
    if hasattr(server_args, "add_draft_attention_backend_choices"):
        server_args.add_draft_attention_backend_choices([names.NAME])
    _register_algorithm()
    if not problems:
        _serve_latent()
        for path, hook in _hooks().items():
            HookRegistry.register(path, hook, HookType.AROUND)


def reasons() -> list[str]:
    """Say why backend or algorithm is not active in this process.

    Empty if it is."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.speculative.spec_registry import get_spec

    found = names.step_problems()
    if get_spec(names.ALGORITHM) is None:
        found.append(f"SGLang does not know the algorithm {names.ALGORITHM}")
    if names.NAME not in ATTENTION_BACKENDS:
        found.append("SGLang has not run the plug-in (sglang.srt.plugins.load_plugins)")
    unhooked = [path for path in _hooks() if path not in HookRegistry._patched]
    return found + [f"SGLang has not applied the hook on {path}" for path in unhooked]


def _register_algorithm() -> None:
    """Let ``--speculative-algorithm`` name the algorithm."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from specattn.integrations.sglang.algorithm import SpecAttnAlgorithm, SpecAttnEagle

    def worker(server_args: Any) -> Any:
        from specattn.integrations.sglang.worker import SpecAttnWorker

        return SpecAttnWorker

    def block_worker(server_args: Any) -> Any:
        from specattn.integrations.sglang.worker import BlockWorker

        return BlockWorker

    for name, kind, made in (
        (names.ALGORITHM, SpecAttnAlgorithm, worker),
        (names.EAGLE, SpecAttnEagle, worker),
        (names.DFLASH, SpecAttnEagle, block_worker),
    ):
        SpeculativeAlgorithm.register(name, supports_overlap=True, spec_class=kind)(made)


def _serve_latent() -> None:
    """Let models with latent attention attend in its absorbed form, prompts too."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    if names.release() == names.OLD:
        resolve_name(names.ADD_LATENT)(names.NAME)
    handler.AttentionBackendRegistry.register(names.NAME, handler._dispatch_mla_subtype)


def _hooks() -> dict[str, Callable[..., Any]]:
    """Return the hooks of the installed release."""
    return HOOKS | (OLD_HOOKS if names.release() == names.OLD else NEW_HOOKS)


def _create(original: Callable[..., Any], factory: Any, *args: Any, **options: Any) -> Any:
    """Add this backend to those that draft workers may choose."""
    name, known, template, *rest = args
    decodes = known["triton"].__name__ == "_create_triton_decode_backend"

    def make() -> Any:
        from specattn.integrations.sglang import backend

        runner = factory.draft_model_runner
        if decodes:
            made: Any = backend.SpecAttnDraft(runner, factory.topk, factory.speculative_num_steps)
        else:
            made = backend.SpecAttnBackend(runner)
        # newer releases stamp what they made with its name
        return made if names.release() == names.OLD else (names.NAME, made)

    return original(factory, name, {**known, names.NAME: make}, template, *rest, **options)


def _capture(original: Callable[..., Any], worker: Any) -> None:
    """Capture the draft extend, as SGLang does for its own backends."""
    from specattn.integrations.sglang.backend import SpecAttnBackend

    original(worker)
    if (
        worker.cuda_graph_runner is not None
        and worker.cuda_graph_runner_for_draft_extend is None
        and isinstance(worker.draft_extend_attn_backend, SpecAttnBackend)
    ):
        worker.cuda_graph_runner_for_draft_extend = resolve_name(names.EXTEND)(worker)


def _allow_pages(original: Callable[..., Any], server_args: Any) -> None:
    """Allow trees over pages of several slots.

    It is the last of what ``original`` checks.
    """
    try:
        original(server_args)
    except ValueError as error:
        ours = f"attention_backend={names.NAME!r}" in str(error)
        if not (ours and "page_size > 1 is only supported" in str(error)):
            raise


def _select(original: Callable[..., Any], i: int, *args: Any) -> Any:
    """Tell the draft which branch each of a step's branches extends."""
    out = original(i, *args)
    from specattn.integrations.sglang.backend import SpecAttnDraft

    if SpecAttnDraft.running is not None:
        SpecAttnDraft.running.grow(i, out[3][2])
    return out


def _choose_masks(original: Callable[..., Any], worker: Any) -> None:
    """Have masks of trees alone, which do not grow with contexts.

    Newer releases read the kind from `SpecAttnBackend.verify_mask`.
    """
    from sglang.srt.speculative.eagle_utils import TreeMaskMode

    from specattn.integrations.sglang.backend import VerifyBuffers

    original(worker)
    target = worker.target_worker.model_runner.attn_backend
    if isinstance(target.get_verify_buffers_to_fill_after_draft(), VerifyBuffers):
        worker.tree_mask_mode = TreeMaskMode.QLEN_ONLY


def _fence(original: Callable[..., Any], runner: Any, *args: Any, **options: Any) -> Any:
    """Have the scheduler wait for the whole forward before it writes.

    SGLang 0.5.15 lets it write once metadata have been prepared, but the layers read the request
    table itself. Newer releases ask the backend (`SpecAttnBackend.shared_read_ends`).
    """
    from specattn.integrations.sglang.backend import SpecAttnBackend

    out = original(runner, *args, **options)
    if isinstance(runner.attn_backend, SpecAttnBackend):
        runner.model_runner.war_fastpath_read_done_event = None
    return out


def _without_snapshots(original: Callable[..., Any], pool: Any, *args: Any, **options: Any) -> None:
    """Allocate no state per node where steps need none."""
    from sglang.srt.server_args import get_global_server_args

    if get_global_server_args().speculative_algorithm in names.STEPS:
        options["speculative_num_draft_tokens"] = None
    original(pool, *args, **options)


def _without_room_for_snapshots(original: Callable[..., Any], runner: Any, rest: float) -> float:
    """Leave the memory of such states to keys and values."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    known = runner.spec_algorithm
    if runner.server_args.speculative_algorithm in names.STEPS:
        runner.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        left: float = original(runner, rest)
    finally:
        runner.spec_algorithm = known
    return left


def _follow(original: Callable[..., Any], owner: Any, *args: Any, **options: Any) -> Any:
    """Have steps follow weights that SGLang has changed, or fail the update."""
    from specattn.integrations.sglang.weights import Weights

    out = original(owner, *args, **options)
    model = owner.model if names.release() == names.OLD else owner.get_model()
    if not (reason := Weights.follow_in(model)):
        return out
    if out is None:
        raise UnsupportedError(f"SGLang algorithm {names.ALGORITHM!r}", [reason])
    return False, reason


HOOKS: dict[str, Callable[..., Any]] = {
    names.CREATE: _create,
    f"{names.WORKER}._capture_cuda_graphs": _capture,
    names.ARGUMENTS: _allow_pages,
    names.SELECT: _select,
}
OLD_HOOKS: dict[str, Callable[..., Any]] = {
    f"{names.WORKER}.init_attention_backend": _choose_masks,
    f"{names.DECODE}.execute": _fence,
    f"{names.EXTEND}.execute": _fence,
    f"{names.STATES}.__init__": _without_snapshots,
    f"{names.RUNNER}.handle_max_mamba_cache": _without_room_for_snapshots,
    **dict.fromkeys(names.OLD_UPDATES, _follow),
}
NEW_HOOKS: dict[str, Callable[..., Any]] = dict.fromkeys(names.NEW_UPDATES, _follow)
