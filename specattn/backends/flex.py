"""Attention through torch's FlexAttention.

Any tree is a mask function over the ancestor words. Correctness first: keys are gathered per
request and padded to the longest, and everything runs in float32 (FlexAttention:
https://arxiv.org/abs/2412.05496). It is compiled where there are compilers, and runs eagerly
elsewhere.
"""

from __future__ import annotations

import logging
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from specattn.backends.base import BoundAttention, Capabilities, FunctionAttention, lists_refused
from specattn.buffers import ReadOnly
from specattn.kernels.attention.reference import gather
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specattn.config import AttnConfig

    Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

log = logging.getLogger(__name__)

#: What torch compiles FlexAttention with: C++ for CPUs, Triton's launchers for GPUs.
COMPILERS = {"cpu": ("g++", "clang++", "c++"), "cuda": ("gcc", "clang", "cc", "g++")}
#: Keys per block of a block mask.
BLOCK = 128
#: Shapes and settings that may be compiled for one layer geometry after another.
MAX_KERNELS = 64
FAR = 1 << 40
#: Numbers before the tensors of a packed mask.
HEAD = 10


class FlexBackend(ReadOnly):
    """FlexAttention; no graphs, because it sizes its gather by the lengths.

    It compiles where that is possible; subclass with ``compiled`` False to run eagerly everywhere.
    """

    name: ClassVar[str] = "flex"
    capabilities: ClassVar[Capabilities] = Capabilities(lists=False)
    compiled: ClassVar[bool] = True

    def __init__(self, config: AttnConfig, device: torch.device) -> None:
        self.config = config
        self._eager_because = eager_reason(device) if self.compiled else "it was asked to"
        if self._eager_because:
            log.info("backend flex runs eagerly on %s: %s", device, self._eager_because)

    @property
    def eager_because(self) -> str | None:
        """The reason why it runs uncompiled; None if it compiles."""
        return self._eager_because

    @staticmethod
    def reasons(config: AttnConfig | None, device: torch.device) -> list[str]:
        """Name what stands in the way."""
        found = []
        if find_spec("torch.nn.attention.flex_attention") is None:
            found.append(f"torch {torch.__version__} has no FlexAttention")
        if device.type not in ("cpu", "cuda"):
            found.append(f"FlexAttention is not tested on {device.type} devices")
        return found

    def bind(self, plan: Plan) -> BoundAttention:
        """Bind to the plan's kind; an UnsupportedError for index lists."""
        if isinstance(plan, CsrPlan):
            raise lists_refused(self.name)
        return FunctionAttention(plan, self.run, {"plan": plan})

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        lse: Tensor | None,
        *,
        plan: AttnPlan | ExtendPlan,
    ) -> None:
        """Attend over gathered keys of a tree mode or ragged prompts."""
        if not len(q):
            return
        if isinstance(plan, AttnPlan):
            keys, live = keys_of_tree(plan, self.config.window_left), None
            rows = q.view(plan.batch, plan.layout.q_len, *q.shape[1:])
        else:
            keys, padded, live = keys_of_prompts(plan, self.config.window_left)
            rows = q[padded]
        found, sums = self.attend(rows, k_cache, v_cache, keys, lse=lse is not None)
        found = found.flatten(0, 1) if live is None else found[live]
        # rows behind a chunk of prompts are nobody's
        out[: len(found)] = found
        if lse is not None and sums is not None:
            lse[: len(found)] = sums.flatten(0, 1) if live is None else sums[live]

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, keys: Keys, *, lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Map ``[B, T, Hq, D]`` to ``[B, T, Hq, Dv]``, with ``lse``."""
        # not earlier: other arguments may still be refused, in one line
        if q.device.type == "cpu":
            _warn_of_cpus()
        # torch has no compiled lse for CPUs
        if self._eager_because is None and not (lse and q.device.type == "cpu"):
            try:
                return self._compiled(q, k_cache, v_cache, keys, lse=lse)
            except _compile_errors() as error:
                self._eager_because = f"it does not compile: {error}".splitlines()[0]
                log.warning("backend flex runs eagerly from now on: %s", self._eager_because)
        with _uncompiled():
            return _flex(q, k_cache, v_cache, keys, self.config, lse=lse, kernel=_attention)

    def _compiled(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, keys: Keys, *, lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Run over shapes of few kinds: torch compiles for each anew."""
        from torch._dynamo import config as dynamo
        from torch.fx.experimental import _config as shapes

        rows = q.shape[1]
        # sizes that happen to be equal in the first call need not be in the next
        few = shapes.patch(use_duck_shape=False)  # type: ignore[attr-defined]
        with dynamo.patch(recompile_limit=MAX_KERNELS), few:
            out, sums = _flex(
                pad(q, (0, 0, 0, 0, 0, max(2 - rows, 0))),
                k_cache,
                v_cache,
                keys.padded(),
                self.config,
                lse=lse,
                kernel=_compiled_attention(),
            )
        return out[:, :rows], None if sums is None else sums[:, :rows]


@cache
def _warn_of_cpus() -> None:
    log.warning("no CUDA device: FlexAttention runs on the CPU, which is slow")


def keys_of_tree(plan: AttnPlan, left: int) -> Keys:
    """Gather the prefix, padded to the longest, then the tail."""
    width = int(plan.seq_lens.max())
    place = torch.arange(width, device=plan.seq_lens.device)
    used = place < plan.seq_lens[:, None]  # [B, width]
    if left >= 0:
        used &= place >= plan.positions.amin(1, keepdim=True) - left
    table = plan.req_to_token[plan.req_pool_indices, :width]
    return Keys(
        torch.cat([table, plan.tail_slots], 1),
        torch.cat([used, torch.ones_like(plan.tail_slots, dtype=torch.bool)], 1),
        plan.seq_lens,
        plan.positions,
        plan.tail_positions,
        plan.tail_words,
        *((0, left) if left >= 0 else ()),
    )


def keys_of_prompts(plan: ExtendPlan, left: int) -> tuple[Keys, Tensor, Tensor]:
    """Gather all keys of every prompt.

    Returns them; ``[B, T]``, rows of q, padded to the longest prompt; and which of them are real.
    """
    begin, end = plan.qo_indptr[:-1, None].long(), plan.qo_indptr[1:, None]
    step = torch.arange(plan.max_q_len, device=begin.device)
    live = begin + step < end  # [B, T]
    place = torch.arange(plan.max_seq_len, device=begin.device)
    prefix = plan.seq_lens.long()[:, None]
    lens = prefix + (end - begin)
    used = place < lens  # [B, N]
    if left >= 0:
        used &= place >= prefix - left
    slots = plan.req_to_token[plan.req_pool_indices, : plan.max_seq_len]
    # they are causal and all listed; the tail is one that nobody sees
    positions = prefix + step
    none = positions.new_zeros(*positions.shape, 1)
    keys = Keys(
        pad(slots, (0, 1)),
        pad(used, (0, 1)),
        lens[:, 0],
        positions,
        none[:, 0],
        none,
        0,
        left if left >= 0 else FAR,
    )
    return keys, (begin + step).masked_fill(~live, 0), live


@dataclass(frozen=True)
class Keys:
    """The gathered keys of every request.

    The fields also say which of the keys its query tokens see. Tensors only, and one mask function
    for all plans: what it captures is an input of the compiled kernel, not a constant of another
    one.

    Parameters
    ----------
    slots, used : Tensor
        ``[B, width + tail]``, slots of the keys, and whether anybody sees them.
    lens : Tensor
        ``[B]``, how many of the first ``width`` there are; a key's position is its place.
    positions : Tensor
        ``[B, T]``, of the query tokens.
    tail_positions, words : Tensor
        ``[B, tail]`` and ``[B, T, W]``: positions, and who sees whom.
    near, far : int
        A key is visible iff ``near <= pos_q - pos_k <= far`` as well.
    """

    slots: Tensor
    used: Tensor
    lens: Tensor
    positions: Tensor
    tail_positions: Tensor
    words: Tensor
    near: int = -FAR
    far: int = FAR

    @property
    def width(self) -> int:
        """Keys before the tail."""
        return self.slots.shape[1] - self.tail_positions.shape[1]

    def padded(self) -> Keys:
        """Return whole blocks, two queries and tail keys at least."""
        rows, tail = max(2 - self.positions.shape[1], 0), max(2 - self.tail_positions.shape[1], 0)
        keys, width = self.slots.shape[1] + tail, self.width
        more = max(-keys % BLOCK, 2 * BLOCK - keys)  # keys that are not there, before the tail

        def widened(of: Tensor) -> Tensor:
            return torch.cat([pad(of[:, :width], (0, more)), pad(of[:, width:], (0, tail))], 1)

        return replace(
            self,
            slots=widened(self.slots),
            used=widened(self.used),
            positions=pad(self.positions, (0, rows)),
            tail_positions=pad(self.tail_positions, (0, tail)),
            words=pad(self.words, (0, 0, 0, rows)),
        )

    def mask(self) -> Mask:
        """Return FlexAttention's ``mask_mod``."""
        data = self._packed()

        def mask(b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            width, rows, tail, count, near, far = (data[at] for at in range(6))
            lens, positions, tail_positions, words = (data[at] for at in range(6, HEAD))
            row, node = b * rows + i, (j - width).clamp(min=0)
            bit = data[words + row * count + node // 64] >> node % 64 & 1
            seen: Tensor = torch.where(j < width, j < data[lens + b], bit != 0)
            place = torch.where(j < width, j, data[tail_positions + b * tail + node])
            distance = data[positions + row] - place
            return seen & (distance >= near) & (distance <= far)

        return mask

    def _packed(self) -> Tensor:
        """Pack all that a mask reads into one tensor.

        The tensor has few sizes, which are constants to torch. For CPUs, torch's names of sizes
        that are not constant get in each other's way in a mask.
        """
        import torch._dynamo

        parts = [self.lens, self.positions, self.tail_positions, self.words]
        begin = list(accumulate((part.numel() for part in parts), initial=HEAD))
        numbers = [
            self.width,
            *self.positions.shape[1:],
            *self.tail_positions.shape[1:],
            *self.words.shape[2:],
            self.near,
            self.far,
            *begin[:-1],
        ]
        size = 1 << max((begin[-1] - 1).bit_length(), 12)
        flat = [part.flatten().long() for part in parts]
        head = torch.tensor(numbers, device=self.lens.device)
        data = torch.cat([head, *flat, head.new_zeros(size - begin[-1])])
        torch._dynamo.mark_static(data)
        return data


def eager_reason(device: torch.device) -> str | None:
    """Say why FlexAttention cannot be compiled for ``device``; None means it can."""
    from torch._dynamo import config
    from torch._dynamo.eval_frame import is_dynamo_supported

    if config.disable or not is_dynamo_supported():
        return "torch.compile is switched off"
    if device.type == "cuda" and find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu" and not torch.cpu._is_avx2_supported():
        return "torch compiles it for processors with AVX2"
    wanted = COMPILERS[device.type]
    return None if any(map(shutil.which, wanted)) else f"none of {', '.join(wanted)} is found"


def _compile_errors() -> tuple[type[Exception], ...]:
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import OperatorIssue

    return TorchDynamoException, FailOnRecompileLimitHit, OperatorIssue


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run FlexAttention's eager code, not traced anew for every shape."""
    import torch.nn.attention.flex_attention as library

    before = library._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    library._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        library._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


def _attention(  # noqa: PLR0913 - as its docstring says
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, scale: float, lse: bool
) -> Any:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    aux: Any = AuxRequest(lse=True) if lse else None
    found: Any = flex_attention(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=True,
        return_aux=aux,
        # the kernel for short queries is compiled for one batch size
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True} if q.is_cuda else None,
    )
    return (found[0], found[1].lse) if lse else (found, None)


@cache
def _compiled_attention() -> Any:
    return torch.compile(_attention, dynamic=True, fullgraph=True)


def _flex(  # noqa: PLR0913 - as its docstring says
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    keys: Keys,
    config: AttnConfig,
    *,
    lse: bool,
    kernel: Any,
) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.flex_attention import create_block_mask

    cap = q.new_tensor(config.logit_cap, dtype=torch.float32)

    def capped(score: Tensor, b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    mask = create_block_mask(
        keys.mask(),
        len(q),
        None,
        q.shape[1],
        keys.slots.shape[1],
        device=q.device,
        BLOCK_SIZE=BLOCK,
    )
    out, sums = kernel(
        q.float().transpose(1, 2),
        # masks let NaN pass
        gather(k_cache, keys.slots, keys.used),
        gather(v_cache, keys.slots, keys.used),
        capped if config.logit_cap else None,
        mask,
        config.sm_scale,
        lse,
    )
    return out.transpose(1, 2), None if sums is None else sums.transpose(1, 2)
