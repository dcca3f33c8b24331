"""SGLang's attention kit on a CPU: its cells, and what of it needs CUDA."""

from __future__ import annotations

import functools
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import forward_context, get_forward_context
from sglang.test.kits.attention_unittest.attention_methods import dense_attention as dense
from sglang.test.kits.attention_unittest.attention_methods import mla_attention as mla
from sglang.test.kits.attention_unittest.runner_modes import (
    cuda_graph_decode_runner as decode,
)
from sglang.test.kits.attention_unittest.runner_modes import (
    speculative_draft_extend_runner as extend,
)
from sglang.test.kits.attention_unittest.runner_modes import speculative_draft_runner as draft
from sglang.test.kits.attention_unittest.runner_modes import (
    speculative_target_verify_runner as verify,
)

if TYPE_CHECKING:
    import unittest
    from collections.abc import Callable, Iterator

NAME = "specattn"
CPU = {"device": "cpu", "dtype": torch.float32}
#: Cells of the kit that a CPU cannot run, and why.
NOT_RUN = {
    "split_op_runner": "SGLang registers the operator of split prompts for CUDA alone",
    "run_dense_frozen_kv_mtp_cuda_graph_runner_case": "the algorithm is refused at start",
}


@dataclass(frozen=True)
class Cell:
    """One case of SGLang's kit."""

    name: str
    run: Callable[[unittest.TestCase], None]


class RunAgain:
    """In place of a CUDA graph: a replay runs what was captured once more.

    What is read on the host at capture is read again, so that the static tensors alone decide.
    """

    def __init__(self, runner: Any = None) -> None:
        self.captured: dict[Any, tuple[Any, Callable[[], Any]]] = {}

    @contextmanager
    def capture_session(self, *args: Any, **options: Any) -> Iterator[None]:
        yield

    def prepare(self, *args: Any, **options: Any) -> None:
        pass

    def can_run(self, *args: Any, **options: Any) -> bool:
        return True

    def capture_one(self, key: Any, run_once: Callable[[], Any], **options: Any) -> None:
        run_once()
        if hook := options.get("post_warmup_hook"):
            hook()
        self.captured[key] = get_forward_context(), run_once

    def replay(self, key: Any, *args: Any, **options: Any) -> Any:
        context, run_once = self.captured[key]
        with forward_context(context):
            return run_once()


@contextmanager
def on_cpu(*, contiguous: bool = False) -> Iterator[None]:
    """Patch what the kit's graph runners take from CUDA.

    Parameters
    ----------
    contiguous : bool
        Lay slots in the order of positions. The kit's verify cells write prefixes there again, over
        pages that another order has given to other positions.
    """
    runners = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
    with ExitStack() as stack:
        for module in (
            "sglang.srt.speculative.eagle_draft_cuda_graph_runner",
            "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner",
        ):
            stack.enter_context(patch(f"{module}.resolve_decode_backend", RunAgain))
        stream = SimpleNamespace(stream=None)
        capture = contextmanager(lambda **options: iter([stream]))
        stack.enter_context(patch.object(draft, "_single_rank_graph_capture", capture))
        stack.enter_context(patch.object(extend, "_single_rank_graph_capture", capture))
        stack.enter_context(patch(f"{runners}.graph_capture", capture))
        if hasattr(resolve_name(runners), "get_or_create_global_graph_capture_stream"):
            stack.enter_context(
                patch(f"{runners}.get_or_create_global_graph_capture_stream", lambda: None)
            )
        stack.enter_context(patch("torch.cuda.get_rng_state", lambda device: None))
        stack.enter_context(patch("torch.cuda.set_rng_state", lambda state, device: None))
        with_window = dense._SWA_DECODE_EXTEND_WINDOW | {NAME}
        stack.enter_context(patch.object(dense, "_SWA_DECODE_EXTEND_WINDOW", with_window))
        if contiguous:
            real = dense.make_loc_fn
            stack.enter_context(
                patch.object(dense, "make_loc_fn", lambda layout, **kw: real("contiguous", **kw))
            )
        yield


def cells() -> list[Cell]:
    """Return all cells that the plug-in must pass."""
    return [*_dense(), *_verify(), *_extend(), *_draft(), *_mla()]


def _cell(name: str, run: Callable[..., None], case: Any, **options: Any) -> Cell:
    return Cell(name, functools.partial(_run, run, case, {**CPU, **options}))


def _run(run: Callable[..., None], case: Any, options: dict[str, Any], testcase: Any) -> None:
    with torch.no_grad(), on_cpu(contiguous="verify" in run.__name__ and "graph" in run.__name__):
        run(testcase, case, **options)


def _dense() -> Iterator[Cell]:
    cases = dense.make_dense_cases(NAME)
    windows = dense.make_swa_no_prefix_input_config_cases(NAME)
    windows += dense.make_swa_prefix_input_config_cases(NAME)
    window = dense.DenseAttentionCase(
        name="swa_decode_window_edges",
        backend=NAME,
        forward_mode=ForwardMode.DECODE,
        num_heads=4,
        num_kv_heads=4,
        page_size=16,
        prefix_lens=(3, 4, 5, 20),
        sliding_window_size=4,
    )
    for case in (*cases, *windows, window):
        for layout in ("shuffled_pages", "interleaved_pages"):
            yield _cell(
                f"{case.name}-{layout}", dense.run_dense_attention_case, case, loc_layout=layout
            )
        if case.page_size == 1:
            yield _cell(
                f"{case.name}-scattered",
                dense.run_dense_attention_case,
                case,
                loc_layout="non_monotonic_extend",
            )
        if case.forward_mode.is_decode():
            yield _cell(
                f"{case.name}-graph",
                decode.run_dense_cuda_graph_decode_case,
                case,
                cuda_graph_capture_batch_size=len(case.prefix_lens) + 1,
            )


def _verify_case(page: int, window: int | None = None, n: int = 3, kv: int = 2) -> Any:
    return dense.DenseAttentionCase(
        name=f"verify_page{page}_kv{kv}{'' if window is None else '_window'}",
        backend=NAME,
        forward_mode=ForwardMode.TARGET_VERIFY,
        num_heads=4,
        num_kv_heads=kv,
        page_size=page,
        prefix_lens=(2, 15, 16),
        extend_lens=(n,) * 3,
        sliding_window_size=window,
    )


def _verify() -> Iterator[Cell]:
    kinds = [("eagle", 1), ("eagle", 2), ("frozen_kv_mtp", 1), ("dflash", 1), ("ngram", 2)]
    cases = [_verify_case(1), _verify_case(16), _verify_case(16, kv=4), _verify_case(16, window=4)]
    for case in cases:
        for kind, topk in kinds:
            name = f"{case.name}-{kind}-topk{topk}"
            options = {"spec_kind": kind, "topk": topk}
            yield _cell(name, verify.run_dense_spec_verify_case, case, **options)
            yield _cell(
                f"{name}-graph",
                verify.run_dense_spec_verify_cuda_graph_case,
                case,
                cuda_graph_capture_batch_size=4,
                **options,
            )


def _extend() -> Iterator[Cell]:
    for page in (1, 16):
        case = replace(_verify_case(page), forward_mode=ForwardMode.DRAFT_EXTEND_V2)
        case = replace(case, name=f"extend_page{page}")
        for pad in ("small_real", "prod_fill"):
            yield _cell(
                f"{case.name}-{pad}",
                extend.run_dense_draft_extend_v2_cuda_graph_case,
                case,
                cuda_graph_capture_batch_size=5,
                pad_style=pad,
            )
        for topk in (1, 2):
            yield _cell(
                f"{case.name}-runner-topk{topk}",
                extend.run_dense_eagle_draft_extend_v2_cuda_graph_runner_case,
                case,
                topk=topk,
            )


def _draft() -> Iterator[Cell]:
    for page, topk in ((1, 1), (16, 1), (1, 2), (1, 4)):
        case = replace(
            _verify_case(page), forward_mode=ForwardMode.DECODE, extend_lens=(), name="draft"
        )
        yield _cell(
            f"draft_page{page}-topk{topk}-runner",
            draft.run_dense_eagle_draft_cuda_graph_runner_case,
            case,
            topk=topk,
            speculative_num_steps=4,
            speculative_num_draft_tokens=5,
        )


#: The kit's own cells have no rotated part, which no model with latent attention lacks.
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16}
_latent = functools.partial(_cell, **LATENT)


def _mla() -> Iterator[Cell]:
    for case in mla.make_mla_cases(NAME):
        yield _latent(case.name, mla.run_mla_attention_case, case)
        if case.forward_mode.is_decode():
            yield _latent(
                f"{case.name}-graph",
                decode.run_mla_cuda_graph_decode_case,
                case,
                cuda_graph_capture_batch_size=len(case.prefix_lens) + 1,
            )
    for page in (1, 16):
        case = mla.MLAAttentionCase(
            name=f"mla_verify_page{page}",
            backend=NAME,
            forward_mode=ForwardMode.TARGET_VERIFY,
            num_heads=4,
            page_size=page,
            prefix_lens=(2, 15, 16),
            extend_lens=(3,) * 3,
        )
        for topk in (1, 2):
            yield _latent(
                f"{case.name}-topk{topk}", verify.run_mla_eagle_verify_case, case, topk=topk
            )
            yield _latent(
                f"{case.name}-topk{topk}-graph",
                verify.run_mla_eagle_verify_cuda_graph_case,
                case,
                topk=topk,
            )
        case = replace(
            case, forward_mode=ForwardMode.DRAFT_EXTEND_V2, name=f"mla_extend_page{page}"
        )
        yield _latent(case.name, extend.run_mla_draft_extend_v2_cuda_graph_case, case)
        yield _latent(
            f"{case.name}-runner",
            extend.run_mla_eagle_draft_extend_v2_cuda_graph_runner_case,
            case,
        )
    for topk in (1, 2):
        case = mla.MLAAttentionCase(
            name="mla_draft",
            backend=NAME,
            forward_mode=ForwardMode.DECODE,
            num_heads=4,
            page_size=1,
            prefix_lens=(2, 15, 16),
        )
        yield _latent(
            f"mla_draft-topk{topk}-runner",
            draft.run_mla_eagle_draft_cuda_graph_runner_case,
            case,
            topk=topk,
        )
