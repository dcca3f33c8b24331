"""The engines of `bench.soak`: every kind of proposer, and every way to record or choose a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from bench.shipped import fitted
from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.models import HFTarget
from specattn.models.hub import PAIR, PAIR_HEADS
from specattn.speculative.lookup import LookupFirst, LookupProposer

if TYPE_CHECKING:
    import torch

    from specattn.engine.policy import Policy

    Pair = tuple[Any, Any]

# of the target's layers, those that the standalone draft has
LAYERS = 10
# the engines share shapes, so that they share compiled kernels
CHAIN = SpecConfig(5, 1, 6, draft_sampling=True)
BEAMS = SpecConfig(5, 4, 16)
BEST_FIRST = SpecConfig(5, 1, 16, tree="best_first", ranks=4)


@dataclass(frozen=True)
class Setting:
    """A proposer: a draft by its kind, perhaps lookup in front, and the tree it makes.

    ``others`` are trees of which any is chosen for every step; ``options`` are the engine's.
    """

    name: str
    kind: str
    config: SpecConfig
    lookup: bool = False
    others: tuple[SpecConfig, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


PLAIN = Setting("plain", "none", BEAMS.plain())
SETTINGS = (
    Setting("EAGLE-3, chain of 5, drawn", "eagle3", CHAIN),
    Setting("EAGLE-3, topk 4, 16 nodes", "eagle3", BEAMS),
    Setting("EAGLE-3, best-first, 16 nodes", "eagle3", BEST_FIRST),
    Setting("DFlash, chain of 5, drawn", "dflash", CHAIN),
    Setting("DFlash, best-first, 16 nodes", "dflash", BEST_FIRST),
    Setting("lookup, 4 matches, 16 nodes", "none", BEAMS, lookup=True),
    Setting("lookup before EAGLE-3, topk 4, 16 nodes", "eagle3", BEAMS, lookup=True),
    Setting("lookup before DFlash, best-first, 16 nodes", "dflash", BEST_FIRST, lookup=True),
    Setting("a model, chain of 5, drawn", "model", CHAIN),
    Setting("a model, topk 4, 16 nodes", "model", BEAMS),
    Setting("EAGLE-3, three graphs", "eagle3", BEAMS, options={"cudagraph": "piecewise"}),
    Setting("EAGLE-3, two-batch overlap", "eagle3", BEAMS, options={"tbo": True}),
    Setting(
        "EAGLE-3, any of three trees",
        "eagle3",
        BEAMS,
        others=(SpecConfig(3, 1, 4), BEAMS.plain()),
    ),
)


class Loader:
    """Makes engines over models that are loaded once.

    Parameters
    ----------
    device, dtype : str, torch.dtype
        Of the models.
    context, rows : int
        Slots of a request, and requests at once.
    policy : Policy
        Chooses where there are several trees.
    """

    def __init__(
        self, device: str, dtype: torch.dtype, context: int, rows: int, policy: Policy
    ) -> None:
        self.device, self.dtype, self.policy = device, dtype, policy
        self.context, self.rows = context, rows

    @cached_property
    def drafts(self) -> dict[str, Pair]:
        """The shipped drafts, and the first layers of the shipped target, by kind."""
        source = HFTarget.from_pretrained(PAIR / "target", dtype=self.dtype, device=self.device)
        with TemporaryDirectory() as folder:
            save_first_layers(PAIR / "target", Path(folder), LAYERS)
            heads = PAIR_HEADS | {"none": None, "model": folder}
            return {kind: fitted(source, kind, head) for kind, head in heads.items()}

    def engine(self, setting: Setting) -> Engine:
        """Make a setting's engine."""
        target, draft = self.drafts[setting.kind]
        if setting.lookup:
            draft = LookupProposer() if draft is None else LookupFirst(LookupProposer(), draft)
        config, *others = (
            replace(one, max_context_len=self.context, max_num_reqs=self.rows)
            for one in (setting.config, *setting.others)
        )
        return Engine(
            target,
            draft,
            config,
            configs=others,
            policy=self.policy if others else None,
            buckets=sorted({max(1, self.rows // 4), self.rows}),
            sampled=True,
            processed=True,
            **setting.options,
        )


def needs(engine: Engine) -> dict[str, Any]:
    """Return which steps an engine has run, and what its proposer needs of memory, in bytes."""
    parts: dict[str, int] = {}
    for one in engine.decoder(engine.config).report():
        parts[one.part] = parts.get(one.part, 0) + one.nbytes
    stats = [decoder.runner.stats for decoder in engine.decoders]
    replays = sum((one.replays for one in stats), Counter[Any]())
    pool = engine.draft.pool if engine.draft is not None else None
    per_token = 0 if pool is None else sum(data[:1].nbytes for data in (*pool.k, *pool.v))
    return {
        "steps_by_part": {part.value: count for part, count in replays.items()},
        "eager_steps": sum(sum(one.eager.values()) for one in stats),
        "kv_bytes_per_token": per_token,
        "state_bytes_per_request": sum(one[:1].nbytes for one in engine.states.drafting.values()),
        "graph_bytes": parts,
        "buckets": engine.buckets,
    }


def save_first_layers(source: Path, folder: Path, count: int) -> None:
    """Write a causal LM of the first layers of another one, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source)
    model.model.layers = model.model.layers[:count]
    model.config.num_hidden_layers = count
    model.config.layer_types = model.config.layer_types[:count]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
