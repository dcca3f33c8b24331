"""An engine's speculative configs, and what their steps gained."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from specattn.checks import kind_of
from specattn.config import TABLE_SIZES
from specattn.engine.policy import Acceptance, GoodputPolicy, Observed
from specattn.engine.ranks import decide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from specattn.config import SpecConfig
    from specattn.engine.policy import Policy

# what must be one for all: the sizes of tables and pools, and what a draft state holds
_SHARED = (*TABLE_SIZES, "draft_sampling")
# steps that acceptance is measured over
_WINDOW = 256


class SpeculativeConfigs:
    """The configs that a policy chooses from for every step.

    They share buffers, and differ in the tree alone. Acceptance is measured over a window of the
    latest steps.

    Parameters
    ----------
    configs : sequence of SpecConfig
        At least one; the first is the one to begin with.
    policy : Policy or None
        Chooses among several; None is a `GoodputPolicy`.
    buckets : sequence of int
        Captured batch sizes.
    window : int
        Steps that acceptance is measured over.
    ranks : ProcessGroup, optional
        The ranks of a sharded target, whose measured times differ: rank 0's policy chooses for all.

    Raises
    ------
    ValueError
        If the configs differ in more than the tree, or there is a policy for one config alone.

    Attributes
    ----------
    all : tuple of SpecConfig
        The configs, each once.
    adaptive : bool
        Whether there are several.
    current : SpecConfig
        The config of the last step that was scheduled; the first config before any.
    reserve_len : int
        Slots past its length that a request needs for a step of any config.
    acceptance : dict
        By config: what its steps in the window gained, and how long its last steps took.
    used, advanced, gained : Counter
        By config, since the engine was made: steps in which some request gained tokens, these
        requests, and the tokens that they were given.
    """

    def __init__(
        self,
        configs: Sequence[SpecConfig],
        policy: Policy | None,
        buckets: Sequence[int],
        window: int = _WINDOW,
        *,
        ranks: ProcessGroup | None = None,
    ) -> None:
        self.all = tuple(dict.fromkeys(configs))
        for name in _SHARED:
            first, *others = dict.fromkeys(getattr(config, name) for config in self.all)
            if others:
                raise ValueError(
                    f"{name} must be the same in all configs, got {first} and {others[0]}"
                )
        self.adaptive = len(self.all) > 1
        if policy is not None and not self.adaptive:
            raise ValueError(
                "policy has nothing to choose from: configs must hold other configs than config"
            )
        self.policy = GoodputPolicy() if policy is None else policy
        if isinstance(policy, type) or not callable(self.policy):
            raise ValueError(
                f"policy must be callable, as a GoodputPolicy is, got {kind_of(policy)}"
            )
        self._ranks = ranks
        self.current = self.all[0]
        self.reserve_len = max(config.reserve_len for config in self.all)
        self.acceptance = {config: Acceptance(config) for config in self.all}
        self.used: Counter[SpecConfig] = Counter()
        self.advanced: Counter[SpecConfig] = Counter()
        self.gained: Counter[SpecConfig] = Counter()
        self._buckets = tuple(buckets)
        self._window = window
        self._recent: deque[tuple[Acceptance, list[int], int, float | None]] = deque()

    def choose(self, rooms: Sequence[int]) -> SpecConfig:
        """Ask the policy for the config of the next step.

        Parameters
        ----------
        rooms : sequence of int
            Slots that the contexts of the requests that take part have left. Where no config fits
            the shortest request, the current one is returned, and the policy is not asked.

        Raises
        ------
        ValueError
            If the policy returns a config that it was not given.
        """
        fitting = self._fitting(max(rooms, default=0))
        if not fitting:
            return self.current
        batch = len(rooms)
        observed = Observed(batch, self._bucket(batch), self.current, fitting, self.acceptance)
        config = decide(self._ranks, partial(self.policy, observed))
        if config not in fitting:
            raise ValueError(f"policy must return one of the configs it is given, got {config}")
        return config

    def fit(self, chosen: SpecConfig, room: int) -> SpecConfig:
        """Return the config for a request with ``room`` slots left.

        That is the chosen config if there is room for it, else the deepest that fits, else plain
        decoding, which needs one slot.

        Parameters
        ----------
        chosen : SpecConfig
            What `choose` returned.
        room : int
            Slots that the request's context has left.
        """
        if chosen.reserve_len <= room:
            return chosen
        return max(
            self._fitting(room),
            key=lambda config: (config.num_steps, config.num_draft_tokens),
            default=chosen.plain(),
        )

    def _fitting(self, room: int) -> tuple[SpecConfig, ...]:
        return tuple(config for config in self.all if config.reserve_len <= room)

    def count(
        self, config: SpecConfig, gained: Sequence[int], handed_out: int, seconds: float | None
    ) -> None:
        """Count a step of one config, and what its requests gained.

        A step in which no request gained anything is not counted, nor one of a config that is not
        among these.

        Parameters
        ----------
        config : SpecConfig
            The config of the step.
        gained : sequence of int
            Tokens, a number per request of the step: 0 for one that had ended before.
        handed_out : int
            Tokens of all requests that lie within their ends.
        seconds : float or None
            How long the step took, if that is known.
        """
        found = self.acceptance.get(config)
        kept = [tokens for tokens in gained if tokens]
        if found is None or not kept:
            return
        self.used[config] += 1
        self.advanced[config] += len(kept)
        self.gained[config] += handed_out
        if not self.adaptive:
            return
        bucket = self._bucket(len(gained))
        found.add(kept)
        found.timed(bucket, seconds)
        self._recent.append((found, kept, bucket, seconds))
        if len(self._recent) > self._window:
            old, tokens, bucket, seconds = self._recent.popleft()
            old.add(tokens, -1)
            old.timed(bucket, seconds, -1)

    def _bucket(self, batch: int) -> int:
        return min((size for size in self._buckets if size >= batch), default=batch)


def smaller_configs(config: SpecConfig) -> tuple[SpecConfig, ...]:
    """Return a config, half of it, its chain, and plain decoding.

    None of them needs more slots per step. Plain decoding returns itself alone.
    """
    if not config.num_steps:
        return (config,)
    half = max(config.num_steps // 2, 1)
    found = [config]
    if config.topk > 1 or config.tree == "best_first":
        smaller = replace(config, num_steps=half, num_draft_tokens=2)
        nodes = min(max(config.num_draft_tokens // 2, half + 1, 2), smaller.max_tree_nodes)
        found.append(replace(smaller, num_draft_tokens=nodes))
        half = config.num_steps
    found.append(replace(config, num_steps=half, topk=1, num_draft_tokens=half + 1, tree="beam"))
    found.append(replace(config, num_steps=0, topk=1, num_draft_tokens=1, tree="beam"))
    return tuple(dict.fromkeys(found))


def powers_of_two(largest: int) -> list[int]:
    """Return the powers of two below the largest batch, and that."""
    sizes = [1 << bit for bit in range(largest.bit_length()) if 1 << bit < largest]
    return [*sizes, largest]
