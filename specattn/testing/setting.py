"""Who is tested, where, and the forwards every test is made of."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import torch

from specattn.backends import choose_backend
from specattn.batch import Phase
from specattn.errors import UnsupportedError
from specattn.testing.cases import (
    Geometry,
    draft_step,
    make_extend_case,
    make_lists_case,
    make_tree_case,
)
from specattn.testing.oracle import Case, Tolerances
from specattn.testing.session import Session, config_of

if TYPE_CHECKING:
    from specattn.backends.base import AttentionBackend, BackendFactory, Capabilities

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


def _chain(q_len: int, phase: Phase) -> Mode:
    return Mode("tree", {"mode": "chain", "q_len": q_len, "phase": phase})


def draft(kind: Kind, topk: int, step: int) -> Mode:
    """Return a draft step, through the table or as lists."""
    numbers = {"topk": topk, "step": step}
    return Mode(kind, numbers if kind == "lists" else draft_step(**numbers))


#: By the names the checks carry.
MODES = {
    "decode": _chain(1, Phase.DECODE),
    "chain_verify": _chain(5, Phase.VERIFY),
    "tree_verify": Mode("tree", {"mode": "tree", "q_len": 7}),
    "draft_chain": draft("tree", 1, 2),
    "draft_tree": draft("tree", 3, 2),
    "draft_lists": draft("lists", 3, 2),
    "draft_extend": _chain(4, Phase.PREFILL),
    "prompt_extend": Mode("extend"),
}


@dataclass(frozen=True)
class Setting:
    """A backend under test, by its class or as a composite.

    Parameters
    ----------
    factory : BackendFactory
        The backend's class, or a composite.
    device, tolerances, geometry, dtypes, whole_pages
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

    @property
    def declared(self) -> Capabilities:
        """What the backend declares, of dtypes those to test."""
        declared = self.factory.capabilities
        return replace(declared, dtypes=self.dtypes or declared.dtypes)

    @property
    def small(self) -> torch.dtype:
        """The smallest dtype: some float8 pools and kernels have no other."""
        return min(self.declared.dtypes, key=attrgetter("itemsize"))

    @cached_property
    def dtype(self) -> torch.dtype:
        """The most precise dtype to test that the device can do."""
        known, form = (torch.float32, torch.float16, torch.bfloat16), vars(self.geometry)
        cases = [
            make_tree_case([1], **(form | {"page_size": 1, "dtype": dtype}))
            for dtype in known
            if dtype in self.declared.dtypes
        ]
        served = [one for one in cases if not self.factory.reasons(config_of(one), self.device)]
        return (served or cases)[0].q.dtype

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
            Columns of the table, or entries per index list; as many as needed if 0.
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
            if form.get("kv_dtype"):
                raise UnsupportedError("this check", ["latent rows are stored as they are"])
            if form["v_head_dim"] >= form["head_dim"]:
                raise UnsupportedError("this check", ["latent values are narrower than keys"])
        if mode.kind == "extend":
            news = [(6, 9, 1, 17)[b % 4] for b in range(len(lengths))]
            return make_extend_case(list(zip(lengths, news, strict=True)), **form)
        make = make_lists_case if mode.kind == "lists" else make_tree_case
        return make(lengths, pads=pads, width=width, **mode.options, **form)

    def backend(self, case: Case) -> AttentionBackend:
        """Make the backend of a case's geometry.

        Raises
        ------
        UnsupportedError
            With the backend's own reasons.
        """
        config = config_of(case)
        return choose_backend(self.factory, [config], self.device)(config, self.device)

    def session(
        self, case: Case, backend: AttentionBackend | None = None, **options: Any
    ) -> Session:
        """Bind a backend, a new one by default, to a case's shapes.

        ``options`` are those of `Session`.

        Raises
        ------
        UnsupportedError
            If the backend cannot serve the geometry, or refuses the plan.
        """
        return Session(backend or self.backend(case), case, self.tolerances, **options)

    def modes(self) -> dict[str, Mode]:
        """Return the modes the declared capabilities cover."""
        held = vars(self.declared)
        return {name: mode for name, mode in MODES.items() if all(held[n] for n in mode.needs)}
