"""What a backend is: reasons it cannot serve a configuration, and `bind`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from specattn.config import AttnConfig, KVScales
    from specattn.plan import Plan


@dataclass(frozen=True)
class Capabilities:
    """What a backend promises, as data: printed by ``specattn backends``, proven by tests.

    Parameters
    ----------
    graphs : bool
        A bound ``run`` (and ``fill``) may be recorded in a CUDA graph.
    host_plan : bool
        ``schedule`` plans on the host and needs ``seq_lens_cpu`` (Pattern B).
    trees : bool
        Any ancestor words; else only layouts that are causal by construction.
    lists : bool
        `CsrPlan` is served.
    extend : bool
        `ExtendPlan` (prompts) is served.
    window, cap, lse : bool
        ``window_left``, ``logit_cap``, and ``run`` with ``lse``.
    dtypes : tuple of torch.dtype
        Of q, k and v.
    page_size : int
        Slots that must lie together: ``SpecConfig.page_size`` is a multiple of it.
    kv_dtypes : tuple of torch.dtype
        Of stored keys and values, besides that of q; see `ScaledAttention`.
    deterministic : bool
        ``deterministic`` is served.
    """

    graphs: bool = False
    host_plan: bool = False
    trees: bool = True
    lists: bool = True
    extend: bool = True
    window: bool = True
    cap: bool = True
    lse: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    page_size: int = 1
    kv_dtypes: tuple[torch.dtype, ...] = ()
    deterministic: bool = False

    @classmethod
    def merged(cls, parts: Sequence[Capabilities]) -> Capabilities:
        """Return what ``parts`` promise together: what all can do, what any of them needs."""
        found: dict[str, Any] = {
            item.name: all(getattr(part, item.name) for part in parts) for item in fields(cls)
        }
        found["host_plan"] = any(part.host_plan for part in parts)
        found["page_size"] = max(part.page_size for part in parts)
        for name in ("dtypes", "kv_dtypes"):
            lists = [getattr(part, name) for part in parts]
            found[name] = tuple(dtype for dtype in lists[0] if all(dtype in x for x in lists))
        return cls(**found)


class Fillable(Protocol):
    """What has metadata on the device."""

    def fill(self) -> None:
        """Derive device metadata from the plan's tensors: no sync, capturable."""


class BoundAttention(Fillable, Protocol):
    """Attention over one plan: ``fill`` and ``schedule`` once per step, ``run`` once per layer."""

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Plan on the host from ``[B]`` int32 prefix lengths; empty for Pattern A backends."""

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend.

        Parameters
        ----------
        q, out : Tensor
            ``[rows, num_qo_heads, head_dim]`` and the same with ``v_head_dim``, written in place;
            rows are the plan's query tokens, request by request.
        k_cache, v_cache : Tensor
            ``[num_slots, num_kv_heads, head_dim]`` / ``v_head_dim``; the plan's own slots are
            already written.
        lse : Tensor, optional
            ``[rows, num_qo_heads]`` float32, natural log-sum-exp of the visible logits, written
            in place. A row that sees no key gets output 0 and lse -inf.
        """


class ScaledAttention(BoundAttention, Protocol):
    """What a backend that declares ``kv_dtypes`` binds where keys and values have one of them."""

    def scaled(self, scales: KVScales) -> BoundAttention:
        """Return the same attention for a layer of these scales: one `fill` serves both."""


class FollowingAttention(BoundAttention, Protocol):
    """What bound attention may offer that runs sooner where an earlier layer has used it."""

    def following(self) -> BoundAttention:
        """Return the same attention for layers that come after another one of this `fill`.

        Since the first of them began, nothing that `run` reads has been written but q and the KV
        of the plan's own slots.
        """


class JointFill(Fillable, Protocol):
    """What bound attention whose metadata follows from lengths and rows may offer besides `fill`.

    One launch fills many, and may do so before a step's tree is known.
    """

    @staticmethod
    def fill_together(bounds: Sequence[Any]) -> None:
        """Fill all of ``bounds``, whose classes inherit this one function."""


class CompositeAttention(ABC):
    """Bound attention made of others, so that these are filled with what else is of their kind."""

    @abstractmethod
    def parts(self) -> Sequence[Fillable]:
        """Return what has to be filled."""

    def fill(self) -> None:
        """Fill all parts."""
        fill_all(self.parts())


def fill_all(bounds: Iterable[Fillable]) -> None:
    """Fill each of ``bounds`` once, in any order, in as few launches as they allow.

    Everything bound for a speculative step may come together: layers, drafts and composites. What
    they read has been written before.
    """
    together: dict[Callable[[Sequence[Any]], None], list[Fillable]] = {}
    for bound in {id(part): part for part in _parts(bounds)}.values():
        joint = getattr(type(bound), "fill_together", None)
        if joint is None:
            bound.fill()
        else:
            together.setdefault(joint, []).append(bound)
    for joint, group in together.items():
        joint(group)


def by_lengths_alone(bounds: Iterable[Fillable]) -> tuple[list[Fillable], list[Fillable]]:
    """Split ``bounds``: what can be filled once lengths are known, and what may read the tree."""
    early: list[Fillable] = []
    late: list[Fillable] = []
    for bound in _parts(bounds):
        (early if hasattr(type(bound), "fill_together") else late).append(bound)
    return early, late


def _parts(bounds: Iterable[Fillable]) -> Iterator[Fillable]:
    for bound in bounds:
        if isinstance(bound, CompositeAttention):
            yield from _parts(bound.parts())
        else:
            yield bound


class PatternA:
    """What bound attention starts from that reads its plan's tensors where they are."""

    def fill(self) -> None:
        """Nothing to derive: the plan's tensors are read as they are."""

    def schedule(self, seq_lens_cpu: Tensor | None) -> None:
        """Nothing to plan on the host."""


class IdleAttention(PatternA):
    """Attention over no request: every tensor is empty, so there is nothing to do."""

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Do nothing: ``out`` has no rows."""

    def scaled(self, scales: KVScales) -> BoundAttention:
        """Return itself."""
        return self


class AttentionBackend(Protocol):
    """Attention for one layer geometry on one device."""

    @property
    def capabilities(self) -> Capabilities:
        """What it promises."""

    @property
    def config(self) -> AttnConfig:
        """The layer geometry."""

    def bind(self, plan: Plan) -> BoundAttention:
        """Return attention over the plan's tensors; the only place that looks at a plan's type."""


class BackendFactory(Protocol):
    """What makes a layer's backend: a backend's class, or a composite of such.

    Every call makes a backend with workspaces and metadata of its own.
    """

    @property
    def name(self) -> str:
        """What users call it."""

    @property
    def capabilities(self) -> Capabilities:
        """What its backends promise."""

    def reasons(self, config: AttnConfig | None, device: torch.device) -> list[str]:
        """Say why it cannot serve ``config`` on ``device``; empty means it can.

        ``config=None`` asks about the device and the installed libraries alone.
        """

    def __call__(self, config: AttnConfig, device: torch.device) -> AttentionBackend:
        """Make the backend of one layer geometry."""


class CompositeBackend(ABC):
    """A backend made of others, each with capabilities of its own."""

    @abstractmethod
    def serving(self, plan: Plan) -> tuple[AttentionBackend, ...]:
        """Return the backends that `bind` binds for ``plan``."""


def recordable(backend: AttentionBackend, plan: Plan) -> bool:
    """Whether what ``backend`` binds to ``plan`` may be recorded in a CUDA graph."""
    if isinstance(backend, CompositeBackend):
        return all(recordable(part, plan) for part in backend.serving(plan))
    return backend.capabilities.graphs


def reasons_of(
    backend: BackendFactory, config: AttnConfig | None, device: torch.device
) -> list[str]:
    """Say why ``backend`` cannot serve ``config``: its own reasons, and what it does not declare.

    Few backends store keys and values in a dtype of their own, or are deterministic, so the others
    need not know of it.
    """
    found = backend.reasons(config, device)
    if config is None:
        return found
    stored = backend.capabilities.kv_dtypes
    if config.kv_dtype not in (None, *stored):
        served = " or ".join(map(str, (config.dtype, *stored)))
        found = [*found, f"kv_dtype must be {served}, got {config.kv_dtype}"]
    if config.deterministic and not backend.capabilities.deterministic:
        found = [*found, "it has no deterministic mode"]
    return found


def named_reasons(
    parts: Iterable[tuple[str, BackendFactory]], config: AttnConfig | None, device: torch.device
) -> list[str]:
    """Say why parts of a composite cannot serve, each reason led by ``"role name: "``."""
    return [
        f"{role} {part.name}: {reason}"
        for role, part in parts
        for reason in reasons_of(part, config, device)
    ]
