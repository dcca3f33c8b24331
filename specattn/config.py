"""The geometry of attention and the shape of speculation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import torch

from specattn.batch import ForwardMode, Phase, RowLayout
from specattn.checks import flag, number, one_of, whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MAX_SLOTS = 2**31
#: OCP E4M3 (arXiv:2209.05433): 4 bits of exponent, 3 of mantissa, no infinities.
FLOAT8 = torch.float8_e4m3fn

# a frozen dataclass may still set its own fields while it is made
_set = object.__setattr__


@dataclass(frozen=True)
class AttnConfig:
    """The attention geometry of one layer.

    Parameters
    ----------
    num_qo_heads, num_kv_heads : int
        Query and KV heads; ``num_qo_heads`` is a multiple of ``num_kv_heads``.
    head_dim : int
        Width of a query and key head.
    v_head_dim : int, optional
        Width of a value head; ``head_dim`` if 0.
    dtype : torch.dtype
        float32, float16 or bfloat16, of q, k, v and the output.
    sm_scale : float, optional
        Factor on the logits; ``head_dim ** -0.5`` if 0. ``latent`` layers must give it, because a
        model scales by the size of its expanded heads.
    window_left : int
        A key is visible iff ``0 <= pos_q - pos_k <= window_left``; -1 turns the window off.
        Hugging Face's ``sliding_window = W`` is ``window_left = W - 1``.
    logit_cap : float
        If above 0, logits become ``logit_cap * tanh(logits / logit_cap)`` (Gemma 2).
    latent : bool
        Absorbed multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): a value is the first
        ``v_head_dim`` numbers of its key and is stored once. Needs one KV head and
        ``v_head_dim < head_dim``.
    kv_dtype : torch.dtype, optional
        How keys and values are stored: ``dtype`` or float8 (e4m3), see `KVScales`. ``latent``
        layers store ``dtype``.
    deterministic : bool
        A query token's result has the same bits in every batch, bucket and mode. Slower; see
        docs/numerics.md.
    split_keys : int
        Keys that a deterministic backend sums up before it merges, a multiple of 128. Different
        values give results that differ in the last bits.
    sinks : bool
        Whether every query head has a learned logit that joins the softmax's sum and has no value
        (gpt-oss). The tensor comes with the call, see `BoundAttention.with_sinks`.

    Raises
    ------
    ValueError
        If the head counts do not divide, a value is of another kind or out of range, or a dtype
        is not served.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    dtype: torch.dtype = torch.float32
    sm_scale: float = 0.0
    window_left: int = -1
    logit_cap: float = 0.0
    latent: bool = False
    kv_dtype: torch.dtype | None = None
    deterministic: bool = False
    split_keys: int = 1024
    sinks: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads must be a multiple of num_kv_heads, got {self.num_qo_heads} "
                f"and {self.num_kv_heads}"
            )
        if self.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"dtype must be float32, float16 or bfloat16, got {self.dtype}")
        if self.kv_dtype == self.dtype:
            _set(self, "kv_dtype", None)
        if self.kv_dtype not in (None, FLOAT8):
            raise ValueError(
                f"kv_dtype must be dtype ({self.dtype}) or {FLOAT8}, got {self.kv_dtype}"
            )
        if self.latent:
            self._check_latent()
        if not self.v_head_dim:
            _set(self, "v_head_dim", self.head_dim)
        if not self.sm_scale:
            _set(self, "sm_scale", self.head_dim**-0.5)

    def _check_numbers(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim"):
            _set(self, name, whole_number(name, getattr(self, name), 1))
        for name in ("v_head_dim", "window_left", "split_keys"):
            _set(self, name, whole_number(name, getattr(self, name)))
        for name in ("sm_scale", "logit_cap"):
            _set(self, name, number(name, getattr(self, name)))
        for name in ("latent", "deterministic", "sinks"):
            flag(name, getattr(self, name))
        if self.v_head_dim < 0:
            raise ValueError(f"v_head_dim must be 0 (head_dim) or more, got {self.v_head_dim}")
        if self.window_left < -1:
            raise ValueError(f"window_left must be -1 (off) or more, got {self.window_left}")
        if not 0 <= self.logit_cap < math.inf:
            raise ValueError(f"logit_cap must be 0 (off) or more, got {self.logit_cap}")
        if not 0 <= self.sm_scale < math.inf:
            raise ValueError(
                f"sm_scale must be 0 (1 / sqrt(head_dim)) or more, got {self.sm_scale}"
            )
        if self.split_keys < 1 or self.split_keys % 128:
            raise ValueError(f"split_keys must be a multiple of 128, got {self.split_keys}")

    def _check_latent(self) -> None:
        if self.num_kv_heads != 1:
            raise ValueError(f"num_kv_heads must be 1 with latent, got {self.num_kv_heads}")
        if not 0 < self.v_head_dim < self.head_dim:
            raise ValueError(
                f"v_head_dim must be 1..{self.head_dim - 1} (below head_dim) with latent, "
                f"got {self.v_head_dim}"
            )
        if not self.sm_scale:
            raise ValueError("sm_scale must be given with latent")
        if self.kv_dtype is not None:
            raise ValueError(f"kv_dtype must be dtype with latent, got {self.kv_dtype}")


@dataclass(frozen=True)
class StateConfig:
    """The geometry of one layer with recurrent states: Gated DeltaNet.

    Such a layer (arXiv:2412.06464) keeps a state per value head and a window of its convolution of
    every request, and nothing per token.

    Parameters
    ----------
    num_k_heads, num_v_heads : int
        Key heads, which are as many query heads, and value heads, each with a state;
        ``num_v_heads`` is a multiple of ``num_k_heads``.
    head_k_dim, head_v_dim : int
        Width of a query and key head, and of a value head: powers of two from 16 to 256.
    conv_width : int
        Tokens that the short convolution reads, the token itself included.
    dtype : torch.dtype
        float32, float16 or bfloat16, of queries, keys, values, windows and the output.
    state_dtype : torch.dtype
        float32 or bfloat16, of states. A bfloat16 state is rounded after every token.
    kv_dtype : None
        There is nothing to store in float8.
    deterministic : bool
        False: a tree is solved as a whole, with sums in another order than token by token. States
        do not depend on that (`HybridPool.commit`).

    Raises
    ------
    ValueError
        If the head counts do not divide, a value is of another kind or out of range, or a dtype
        is not served.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_width: int = 4
    dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    kv_dtype: None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("num_k_heads", "num_v_heads"):
            _set(self, name, whole_number(name, getattr(self, name), 1))
        for name in ("head_k_dim", "head_v_dim"):
            size = whole_number(name, getattr(self, name), 16, 256)
            _set(self, name, size)
            if size & (size - 1):
                raise ValueError(f"{name} must be a power of two, got {size}")
        _set(self, "conv_width", whole_number("conv_width", self.conv_width, 2, 8))
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"num_v_heads must be a multiple of num_k_heads, got {self.num_v_heads} "
                f"and {self.num_k_heads}"
            )
        if self.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"dtype must be float32, float16 or bfloat16, got {self.dtype}")
        if self.state_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"state_dtype must be float32 or bfloat16, got {self.state_dtype}")
        if self.kv_dtype is not None:
            raise ValueError(f"kv_dtype must be None in layers with states, got {self.kv_dtype}")
        if flag("deterministic", self.deterministic):
            raise ValueError("deterministic must be False in layers with states")

    @property
    def conv_channels(self) -> int:
        """What the convolution reads of a token: queries, keys and values."""
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim


#: A model's layer, by what it keeps of requests.
LayerConfig: TypeAlias = AttnConfig | StateConfig


@dataclass(frozen=True)
class KVScales:
    """The scales of one layer's float8 keys and values.

    A pool stores ``x / scale``, rounded to nearest and clamped to +-448.

    Parameters
    ----------
    k, v : float
        Normal float32 numbers above 0.

    Raises
    ------
    ValueError
        If one is another value.
    """

    k: float = 1.0
    v: float = 1.0

    def __post_init__(self) -> None:
        limits = torch.finfo(torch.float32)
        for name in ("k", "v"):
            scale = number(name, getattr(self, name))
            _set(self, name, scale)
            # the reciprocal must be a normal number, too
            if not limits.tiny <= scale <= 1 / limits.tiny:
                raise ValueError(
                    f"{name} (the scale of float8 {name}) must be a normal float32 above 0, "
                    f"got {scale}"
                )

    @classmethod
    def of(
        cls, k: Tensor | Sequence[Tensor], v: Tensor | Sequence[Tensor], *, headroom: float = 2.0
    ) -> tuple[Self, ...]:
        """Return all layers' scales from samples of keys and values.

        Parameters
        ----------
        k, v : Tensor or sequence of Tensor
            ``[layers, ...]`` or one tensor per layer, of any floating dtype. ``k`` and ``v`` of a
            `KVPool` that has run a few prompts will do: slots without KV hold 0.
        headroom : float
            The largest number of the sample becomes ``448 / headroom``. Larger numbers are
            clamped later. A factor of 2 costs only the smallest numbers their precision.

        Raises
        ------
        ValueError
            If ``headroom`` is not above 0, a number of the sample is not finite, or the tensors
            differ in layers.
        """
        if not 0 < number("headroom", headroom) < math.inf:
            raise ValueError(f"headroom must be above 0, got {headroom}")
        if len(k) != len(v):
            raise ValueError(f"k and v must have the same layers, got {len(k)} and {len(v)}")
        most = torch.finfo(FLOAT8).max / headroom
        # a layer without any number but 0 has no scale of its own
        tops = [[float(x.abs().max()) / most or 1.0 for x in layers] for layers in (k, v)]
        return tuple(cls(*pair) for pair in zip(*tops, strict=True))


UNSCALED = KVScales()


#: What a `SpecConfig` says beside its tree: the sizes of tables and pools.
TABLE_SIZES = ("max_context_len", "max_num_reqs", "page_size")
#: How a tree is chosen of what a draft proposes.
TreeKind = Literal["beam", "best_first"]


@dataclass(frozen=True)
class SpecConfig:
    """The depth, width and nodes of a step's tree, with its limits.

    ``num_steps = 0, num_draft_tokens = 1`` is plain decoding.

    Parameters
    ----------
    num_steps : int
        Depth of the draft tree below its root (the bonus token).
    topk : int
        Branches kept at every depth.
    num_draft_tokens : int
        Nodes sent to verification, the root included.
    max_context_len : int
        Longest context a request may reach, in tokens, draft tokens included.
    max_num_reqs : int
        Requests alive at once.
    page_size : int
        KV slots per page, a power of two up to 512, as in the `SlotTable`.
    draft_sampling : bool
        Draw draft tokens from the draft model's distribution and verify them by rejection
        sampling (Leviathan et al., arXiv:2211.17192). By default the draft proposes its most
        probable tokens, and only the target's distribution decides. Chains only (topk 1).
    draft_len : int
        Slots past the committed context that the draft may write, if it writes further than trees
        of this shape ask for: `reserving` sets it. An engine does so for its draft.
    tree : {"beam", "best_first"}
        How nodes are chosen: by beams of ``topk``, as EAGLE-2 does (a chain with ``topk`` 1); or
        best first among the ``ranks`` most probable tokens of every depth, each taken to be
        independent of the depths before it, with ``topk`` 1.
    ranks : int
        Most probable tokens of a depth that a best-first tree chooses from.

    Raises
    ------
    ValueError
        If a value is of another kind or out of range, or the numbers describe no tree.
    """

    num_steps: int = 5
    topk: int = 1
    num_draft_tokens: int = 6
    max_context_len: int = 4096
    max_num_reqs: int = 16
    page_size: int = 1
    draft_sampling: bool = False
    draft_len: int = 0
    tree: TreeKind = "beam"
    ranks: int = 8

    def __post_init__(self) -> None:
        self._check_ranges()
        if self.draft_sampling and self.topk > 1:
            raise ValueError(f"draft_sampling needs topk 1, got {self.topk}")
        if self.tree == "best_first":
            self._check_best_first()
        most = self.max_tree_nodes
        if not self.num_steps:
            if self.num_draft_tokens != 1 or self.topk != 1:
                raise ValueError("num_steps 0 (plain decoding) needs topk 1 and num_draft_tokens 1")
        elif self.topk == 1 and self.tree == "beam":
            if self.num_draft_tokens != self.num_steps + 1:
                raise ValueError(
                    f"num_draft_tokens must be num_steps + 1 = {self.num_steps + 1} with topk 1, "
                    f"got {self.num_draft_tokens}"
                )
        elif not 2 <= self.num_draft_tokens <= most:
            raise ValueError(
                f"num_draft_tokens must be 2..{most} with {self._width} and "
                f"num_steps {self.num_steps}, got {self.num_draft_tokens}"
            )
        if self.reserve_len > self.max_context_len:
            raise ValueError(
                f"max_context_len must be at least {self.reserve_len} (one step's draft slots), "
                f"got {self.max_context_len}"
            )

    def _check_best_first(self) -> None:
        if self.topk > 1:
            raise ValueError(f"tree='best_first' needs topk 1, got {self.topk}")
        if self.draft_sampling:
            raise ValueError("tree='best_first' has no chain to draw: draft_sampling must be False")
        if not self.num_steps:
            raise ValueError("tree='best_first' needs num_steps of at least 1, got 0")

    @property
    def _width(self) -> str:
        return f"ranks {self.ranks}" if self.tree == "best_first" else f"topk {self.topk}"

    def _check_ranges(self) -> None:
        limits = {
            "num_steps": (0, 64),
            "topk": (1, 64),
            "num_draft_tokens": (1, 256),
            "max_context_len": (1, MAX_SLOTS - 1),
            "max_num_reqs": (1, 2**20),
            "page_size": (1, 512),
            "draft_len": (0, 2**16),
            "ranks": (1, 255),
        }
        for name, (low, high) in limits.items():
            _set(self, name, whole_number(name, getattr(self, name), low, high))
        flag("draft_sampling", self.draft_sampling)
        one_of("tree", self.tree, "beam", "best_first")
        if self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size must be a power of two, got {self.page_size}")

    @property
    def max_tree_nodes(self) -> int:
        """The most nodes of a tree, from its depth and width."""
        if not self.num_steps:
            return 1
        if self.tree == "best_first":
            prefixes = 0
            for depth in range(1, self.num_steps + 1):
                prefixes = min(prefixes + self.ranks**depth, 255)
            return prefixes + 1
        return 1 + self.topk + (self.num_steps - 1) * self.topk**2

    @property
    def proposals(self) -> int:
        """Tokens that are kept of a depth: ``ranks`` or ``topk``."""
        return self.ranks if self.tree == "best_first" else self.topk

    @property
    def num_draft_forwards(self) -> int:
        """Draft decode forwards per step; the deepest tokens are never run."""
        return max(self.num_steps - 1, 0)

    @cached_property
    def reserve_len(self) -> int:
        """Slots that a step may write past the committed context."""
        drafts = self.topk * self.num_draft_forwards
        return max(self.num_draft_tokens, drafts, self.num_steps + 1, self.draft_len)

    def reserving(self, slots: int) -> SpecConfig:
        """Return the config whose `reserve_len` is at least ``slots``."""
        return self if slots <= self.reserve_len else replace(self, draft_len=slots)

    def layout(self, mode: ForwardMode, step: int = 0) -> RowLayout:
        """Return a mode's row layout.

        Parameters
        ----------
        mode : ForwardMode
            Prompts have none: their rows are ragged (`ExtendPlan`).
        step : int
            The draft forward, from 0; of ``DRAFT_DECODE`` only.
        """
        return self.layouts(step)[mode]

    def layouts(self, step: int = 0) -> dict[ForwardMode, RowLayout]:
        """Return the row layouts of all modes; see `layout`."""
        nodes, depth, page = self.num_draft_tokens, self.num_steps + 1, self.page_size
        chain = self.topk == 1 and self.tree == "beam"
        return {
            ForwardMode.DECODE: RowLayout(1, 1, Phase.DECODE, True, page),
            ForwardMode.DRAFT_DECODE: RowLayout.of_branches(self.topk, step, page),
            ForwardMode.TARGET_VERIFY: RowLayout(nodes, nodes, Phase.VERIFY, chain, page),
            ForwardMode.DRAFT_EXTEND: RowLayout(depth, depth, Phase.PREFILL, True, page),
        }

    def plain(self) -> SpecConfig:
        """Return plain decoding over the same tables, one token per step."""
        return SpecConfig(num_steps=0, num_draft_tokens=1, **self.sizes)

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of its tables, by name."""
        return {name: getattr(self, name) for name in TABLE_SIZES}
