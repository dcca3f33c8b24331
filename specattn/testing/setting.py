"""Who is tested, where, and the forwards every test is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch

from specattn.backends.base import reasons_of
from specattn.batch import Phase
from specattn.errors import UnsupportedError
from specattn.testing.cases import make_extend_case, make_lists_case, make_tree_case
from specattn.testing.oracle import Case, Tolerances
from specattn.testing.session import Session, config_of

if TYPE_CHECKING:
    from specattn.backends.base import AttentionBackend, BackendFactory
    from specattn.config import AttnConfig

Kind = Literal["tree", "lists", "extend"]


@dataclass(frozen=True)
class Mode:
    """A forward mode, as the numbers a backend sees.

    Parameters
    ----------
    kind : {"tree", "lists", "extend"}
        Which plan.
    options : dict
        Of the case's builder.
    """

    kind: Kind
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def needs(self) -> tuple[str, ...]:
        """The capabilities it takes."""
        if self.kind != "tree":
            return (self.kind,)
        return () if self.options["mode"] == "chain" else ("trees",)


def _chain(q_len: int, phase: Phase, tail_len: int = 0) -> Mode:
    options = {"mode": "chain", "q_len": q_len, "tail_len": tail_len or q_len, "phase": phase}
    return Mode("tree", options)


#: By the names the checks carry.
MODES = {
    "decode": _chain(1, Phase.DECODE),
    "chain_verify": _chain(5, Phase.VERIFY),
    "tree_verify": Mode("tree", {"mode": "tree", "q_len": 7}),
    "draft_chain": _chain(1, Phase.DRAFT, tail_len=3),
    "draft_tree": Mode("tree", {"mode": "draft", "q_len": 3, "tail_len": 9, "phase": Phase.DRAFT}),
    "draft_lists": Mode("lists", {"topk": 3, "step": 2}),
    "draft_extend": _chain(4, Phase.PREFILL),
    "prompt_extend": Mode("extend"),
}


@dataclass(frozen=True)
class Geometry:
    """The layer, and the pages, that checks use unless they sweep them.

    Parameters
    ----------
    heads : tuple of int
        Query and KV heads.
    head_dim, v_head_dim : int
        Widths; ``v_head_dim`` 0 means ``head_dim``.
    latent : bool
        Whether values are the first ``v_head_dim`` columns of the keys: absorbed latent attention,
        with one KV head, whatever ``heads`` says.
    page_size : int
        Slots of a page; as many as the backend needs if 0.
    """

    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    v_head_dim: int = 0
    latent: bool = False
    page_size: int = 0


@dataclass(frozen=True)
class Setting:
    """A backend under test, by its class or as a composite.

    Parameters
    ----------
    factory : BackendFactory
        The backend's class, or a composite.
    device : torch.device
        Where it runs.
    tolerances : Tolerances
        How far it may be from the oracle.
    geometry : Geometry
        A layer it serves.
    dtypes : tuple of torch.dtype
        Those to test; all that are declared if empty.
    whole_pages : bool
        As in `specattn.testing.conformance`.
    deterministic : bool
        Whether forwards are.
    """

    factory: BackendFactory
    device: torch.device
    tolerances: Tolerances = field(default_factory=Tolerances)
    geometry: Geometry = field(default_factory=Geometry)
    dtypes: tuple[torch.dtype, ...] = ()
    whole_pages: bool = False
    deterministic: bool = False

    @cached_property
    def dtype(self) -> torch.dtype:
        """The most precise dtype to test that the device can do."""
        declared = self.dtypes or self.factory.capabilities.dtypes
        order = [d for d in (torch.float32, torch.float16, torch.bfloat16) if d in declared]
        for dtype in order:
            if not self.factory.reasons(self.config(dtype), self.device):
                return dtype
        return order[0]

    def config(self, dtype: torch.dtype) -> AttnConfig:
        """Return the geometry in ``dtype``."""
        form = vars(self.geometry) | {"page_size": 1}
        if self.geometry.latent:
            form["heads"] = form["heads"][0], 1
        return config_of(make_tree_case([1], **form, dtype=dtype))

    def case(
        self, mode: Mode, lengths: list[int], *, pads: int = 0, width: int = 0, **form: Any
    ) -> Case:
        """Draw a forward of ``mode`` over prefixes of ``lengths``.

        Parameters
        ----------
        mode : Mode
            What runs.
        lengths : list of int
            Prefix length of every request.
        pads : int
            Padding requests at the end; not of prompts.
        width : int
            Fixes the table's columns, and with them the entries of index lists, if not 0.
        **form
            The fields of `specattn.testing.cases.Form` that differ from the setting's.

        Raises
        ------
        UnsupportedError
            For latent layers, if KV has another dtype or values are as wide as keys.
        """
        form = {
            "device": self.device,
            "whole_pages": self.whole_pages,
            "deterministic": self.deterministic,
            **vars(self.geometry),
            **form,
        }
        form["page_size"] = form["page_size"] or self.factory.capabilities.page_size
        form.setdefault("dtype", self.dtype)
        if self.geometry.latent:
            form["heads"] = form["heads"][0], 1
            if form.get("kv_dtype"):
                raise UnsupportedError("this check", ["latent rows are stored as they are"])
            if form["v_head_dim"] >= form["head_dim"]:
                raise UnsupportedError("this check", ["latent values are narrower than keys"])
        if mode.kind == "extend":
            news = [(6, 9, 1, 17)[b % 4] for b in range(len(lengths))]
            return make_extend_case(list(zip(lengths, news, strict=True)), **form)
        options = mode.options | {"pads": pads}
        if mode.kind == "lists":
            entries = width * (len(lengths) + pads) * options["topk"]
            return make_lists_case(lengths, width=entries, **options, **form)
        return make_tree_case(lengths, width=width, **options, **form)

    def backend(self, case: Case) -> AttentionBackend:
        """Make the backend of a case's geometry.

        Raises
        ------
        UnsupportedError
            With the backend's own reasons.
        """
        config = config_of(case)
        reasons = reasons_of(self.factory, config, self.device)
        if reasons:
            raise UnsupportedError(f"backend {self.factory.name!r}", reasons)
        return self.factory(config, self.device)

    def session(
        self, case: Case, backend: AttentionBackend | None = None, within: Session | None = None
    ) -> Session:
        """Bind a backend, a new one by default, to a case's shapes.

        Raises
        ------
        UnsupportedError
            If the backend cannot serve the geometry, or refuses the plan.
        """
        return Session(backend or self.backend(case), case, self.tolerances, within)

    def modes(self) -> dict[str, Mode]:
        """Return the modes the declared capabilities cover."""
        declared = self.factory.capabilities
        return {
            name: mode
            for name, mode in MODES.items()
            if all(getattr(declared, need) for need in mode.needs)
        }
