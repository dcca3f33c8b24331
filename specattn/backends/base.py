"""The interface of a backend: reasons against a configuration, and `bind`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch

from specattn.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from specattn.config import AttnConfig, KVScales
    from specattn.kernels.fused.fp8 import RowsFormat, ScaledRows
    from specattn.plan import Plan


@dataclass(frozen=True)
class Capabilities:
    """The capabilities of a backend, as data.

    ``specattn backends`` prints it and tests prove it.

    Parameters
    ----------
    graphs : bool
        A bound ``run`` (and ``fill``) may be recorded in a CUDA graph.
    host_plan : bool
        ``schedule`` plans on the host and needs ``seq_lens_cpu``.
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
        Of stored keys and values, besides that of q; see `BoundAttention.for_layer`.
    deterministic : bool
        ``deterministic`` is served.
    sinks : bool
        ``sinks`` are served; see `BoundAttention.with_sinks`.
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
    sinks: bool = False

    @classmethod
    def merged(cls, parts: Sequence[Capabilities]) -> Capabilities:
        """Return what all ``parts`` offer, and what any of them needs."""
        found: dict[str, Any] = {
            item.name: all(getattr(part, item.name) for part in parts) for item in fields(cls)
        }
        found["host_plan"] = any(part.host_plan for part in parts)
        found["page_size"] = max(part.page_size for part in parts)
        for name in ("dtypes", "kv_dtypes"):
            lists = [getattr(part, name) for part in parts]
            found[name] = tuple(dtype for dtype in lists[0] if all(dtype in x for x in lists))
        return cls(**found)


class BoundAttention(ABC):
    """Attention over one plan.

    A caller calls ``fill`` and ``schedule`` once per step, ``run`` once per layer. What a backend's
    `AttentionBackend.bind` returns inherits this and defines `run`; whatever else it does not
    define, it does not need.
    """

    # both are empty on purpose: few attentions need them
    def schedule(self, seq_lens_cpu: Tensor | None) -> None:  # noqa: B027
        """Plan on the host from ``[B]`` int32 lengths, if it plans there."""

    def fill(self) -> None:  # noqa: B027
        """Derive device metadata from the plan's tensors: no sync, capturable."""

    @abstractmethod
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

    def result(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, lse: Tensor | None = None
    ) -> Tensor:
        """Attend into a new tensor.

        A backend whose library allocates its results overrides it, and copies nothing.

        Parameters
        ----------
        q, k_cache, v_cache, lse
            As in `run`.

        Returns
        -------
        Tensor
            ``[rows, num_qo_heads, v_head_dim]``, contiguous, of q's dtype.
        """
        out = q.new_empty(*q.shape[:-1], v_cache.shape[-1])
        self.run(q, k_cache, v_cache, out, lse)
        return out

    def rows_for(
        self, how: RowsFormat, q: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor | ScaledRows:
        """Attend for a product of quantised rows.

        A backend whose kernels quantise overrides it.

        Parameters
        ----------
        how : RowsFormat
            How the product takes its rows.
        q, k_cache, v_cache
            As in `run`.

        Returns
        -------
        Tensor or ScaledRows
            ``[rows, num_qo_heads * v_head_dim]``, quantised where that costs no launch.
        """
        return self.result(q, k_cache, v_cache).flatten(1)

    @property
    def prefetches(self) -> bool:
        """Whether `for_layer` makes use of ``prefetch``."""
        return False

    def for_layer(self, scales: KVScales | None, *, prefetch: bool) -> BoundAttention:
        """Return this attention as one layer runs it.

        One `fill` serves all layers.

        Parameters
        ----------
        scales : KVScales or None
            What the layer's keys and values are multiplied by; None unless they are stored in one
            of ``kv_dtypes``.
        prefetch : bool
            Whether another layer has run since `fill`. Nothing that `run` reads has been written
            since that layer began but q and the KV of the plan's own slots, so a kernel may read
            the rest before the kernel in front of it ends.

        Raises
        ------
        NotImplementedError
            For scales, if the backend declares no ``kv_dtypes``.
        """
        if scales is not None:
            raise NotImplementedError(f"{type(self).__name__} takes no scales of keys and values")
        return self

    def with_sinks(self, sinks: Tensor) -> BoundAttention:
        """Return this attention with a layer's sinks.

        It neither allocates nor launches, so it may be called in every forward, and be recorded.
        A sink is a logit of its head that every query sees and that has no value: with it,
        ``out = sum(exp(s_j) v_j) / (exp(sink) + sum(exp(s_j)))``, and the lse is the log of that
        sum. Neither scale nor cap applies to it.

        Parameters
        ----------
        sinks : Tensor
            ``[num_qo_heads]`` float32, float16 or bfloat16, contiguous; -inf is none.

        Raises
        ------
        NotImplementedError
            If the backend does not declare ``sinks``.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no sinks")


@dataclass(frozen=True)
class FunctionAttention(BoundAttention):
    """Attention by one function over a plan's tensors; nothing to fill.

    ``function`` takes what `BoundAttention.run` takes, and ``options`` by name, with the scales of
    a layer added as ``k_scale`` and ``v_scale``, and its sinks as ``sinks``.
    """

    plan: Plan
    function: Callable[..., None]
    options: Mapping[str, Any]

    def for_layer(self, scales: KVScales | None, *, prefetch: bool) -> Self:
        """Return the same with a layer's scales; see `BoundAttention.for_layer`."""
        if scales is None:
            return self
        return replace(self, options={**self.options, "k_scale": scales.k, "v_scale": scales.v})

    def with_sinks(self, sinks: Tensor) -> Self:
        """Return the same with a layer's sinks; see `BoundAttention.with_sinks`."""
        return replace(self, options={**self.options, "sinks": sinks})

    def run(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None = None
    ) -> None:
        """Attend; see `BoundAttention.run`."""
        self.function(q, k_cache, v_cache, out, lse, **self.options)


def idle_attention(*tensors: Tensor | None, **options: object) -> None:
    """Attend with no query token, as a rank without work does."""


class JointFill(BoundAttention):
    """Attention whose metadata follows from lengths and rows alone.

    One launch fills many of them, and may do so before a step's tree is known.
    """

    def fill(self) -> None:
        """Fill this one."""
        self.fill_together([self])

    @staticmethod
    @abstractmethod
    def fill_together(bounds: Sequence[Any]) -> None:
        """Fill all of ``bounds``, whose classes inherit this one function."""


class CompositeAttention(ABC):
    """Attention made of others, each filled with its own kind."""

    @abstractmethod
    def parts(self) -> Sequence[Fillable]:
        """Return what has to be filled."""

    def fill(self) -> None:
        """Fill all parts."""
        fill_all(self.parts())


#: An object with metadata on the device.
Fillable = BoundAttention | CompositeAttention


def fill_all(bounds: Iterable[Fillable]) -> None:
    """Fill each of ``bounds`` once.

    The order is free, and the launches are as few as they allow. Everything bound for a speculative
    step may come together: layers, drafts and composites. What they read has been written before.
    """
    together: dict[Callable[[Sequence[Any]], None], list[JointFill]] = {}
    for bound in {id(part): part for part in _parts(bounds)}.values():
        if isinstance(bound, JointFill):
            together.setdefault(bound.fill_together, []).append(bound)
        else:
            bound.fill()
    for fill_together, group in together.items():
        fill_together(group)


def by_lengths_alone(bounds: Iterable[Fillable]) -> tuple[list[Fillable], list[Fillable]]:
    """Split ``bounds`` into what needs lengths alone and what reads trees."""
    early: list[Fillable] = []
    late: list[Fillable] = []
    for bound in _parts(bounds):
        (early if isinstance(bound, JointFill) else late).append(bound)
    return early, late


def _parts(bounds: Iterable[Fillable]) -> Iterator[Fillable]:
    for bound in bounds:
        if isinstance(bound, CompositeAttention):
            yield from _parts(bound.parts())
        else:
            yield bound


class AttentionBackend(Protocol):
    """Attention for one layer geometry on one device."""

    @property
    def capabilities(self) -> Capabilities:
        """Its capabilities."""

    @property
    def config(self) -> AttnConfig:
        """The layer geometry."""

    def bind(self, plan: Plan) -> BoundAttention:
        """Return attention over the plan's tensors.

        Only this method looks at a plan's type.

        Raises
        ------
        UnsupportedError
            For a plan that the backend does not serve.
        """


class BackendFactory(Protocol):
    """A maker of a layer's backend.

    It is a backend's class, or a composite of such. Every call makes a backend with workspaces and
    metadata of its own.
    """

    @property
    def name(self) -> str:
        """Its name for users."""

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of its backends."""

    def reasons(self, config: AttnConfig | None, device: torch.device) -> list[str]:
        """Say why it cannot serve ``config`` on ``device``; empty means it can.

        ``config=None`` asks about the device and the installed libraries alone.
        """

    def __call__(self, config: AttnConfig, device: torch.device) -> AttentionBackend:
        """Make the backend of one layer geometry."""


@dataclass(frozen=True)
class CompositeBackend:
    """A backend made of others, each with capabilities of its own.

    ``serving`` returns the part that a plan is bound to.
    """

    config: AttnConfig
    capabilities: Capabilities
    serving: Callable[[Plan], AttentionBackend]

    def bind(self, plan: Plan) -> BoundAttention:
        """Bind the part that serves the plan, and no other.

        So workspaces exist only where they are used, and a capture touches only what replays use.
        """
        return self.serving(plan).bind(plan)


def attending(backend: AttentionBackend, plan: Plan) -> AttentionBackend:
    """Return what attends over a plan: of a composite, a part."""
    while isinstance(backend, CompositeBackend):
        backend = backend.serving(plan)
    return backend


def reasons_of(
    backend: BackendFactory, config: AttnConfig | None, device: torch.device
) -> list[str]:
    """Say why ``backend`` cannot serve ``config``.

    The reasons are its own, and what it does not declare: few backends store keys and values in a
    dtype of their own, are deterministic or have sinks, and the others need not know of it.
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
    if config.sinks and not backend.capabilities.sinks:
        found = [*found, "it has no attention sinks"]
    return found


def undeclared(config: AttnConfig, declared: Capabilities) -> list[str]:
    """Name a dtype, a window and a cap that are not ``declared``."""
    found = []
    if config.dtype not in declared.dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in declared.dtypes)
        found.append(f"dtype must be {names}, got {config.dtype}")
    if config.window_left >= 0 and not declared.window:
        found.append(f"window_left is not served, got {config.window_left}")
    if config.logit_cap and not declared.cap:
        found.append(f"logit_cap is not served, got {config.logit_cap}")
    return found


def head_reasons(config: AttnConfig, served: Sequence[int], latent: str = "") -> list[str]:
    """Say why heads are none of ``served``; ``latent`` serves latent layers."""
    if config.latent:
        return [f"latent layers are {latent}'s" if latent else "latent layers are not served"]
    found, (*first, last) = [], map(str, served)
    if config.head_dim not in served:
        found.append(f"head_dim must be {', '.join(first)} or {last}, got {config.head_dim}")
    if config.v_head_dim != config.head_dim:
        found.append(f"v_head_dim must equal head_dim {config.head_dim}, got {config.v_head_dim}")
    return found


def latent_reasons(config: AttnConfig, served: Sequence[tuple[int, int]]) -> list[str]:
    """Say why a ``latent`` row, rank + rope, is none of ``served``."""
    if not config.latent:
        return ["only latent layers are served (AttnConfig.latent)"]
    rank, rope = config.v_head_dim, config.head_dim - config.v_head_dim
    if (rank, rope) in served:
        return []
    rows = " or ".join(f"{first} + {second}" for first, second in served)
    return [f"a row must be {rows} numbers, got {rank} + {rope}"]


def lists_refused(backend: str) -> UnsupportedError:
    """Return the error of a backend that serves no index lists."""
    return UnsupportedError(
        f"backend {backend!r}", ["index lists are not served (indices='table')"]
    )


def installed(module: str) -> bool:
    """Whether ``module`` can be found, without importing its parent packages."""
    first, *rest = module.split(".")
    name, spec = first, find_spec(first)
    for part in rest:
        name = f"{name}.{part}"
        spec = spec and PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec is not None


def imported(target: str, backend: str) -> Any:
    """Import ``module`` or ``module:attribute`` for a backend.

    Raises
    ------
    UnsupportedError
        With whatever the import raised: a package built for another system raises an OSError or
        a RuntimeError where one that is not there raises an ImportError.
    """
    module, _, attribute = target.partition(":")
    try:
        found = import_module(module)
        return getattr(found, attribute) if attribute else found
    except Exception as error:
        raise UnsupportedError(
            f"backend {backend!r}", [f"{target} cannot be imported: {error}"]
        ) from error
