"""An engine's speculative configs, and what their steps gained."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

from specattn.checks import instance, kind_of, listed, whole_numbers
from specattn.config import TABLE_SIZES, SpecConfig
from specattn.engine.policy import Acceptance, GoodputPolicy, Observed, RestingPolicy
from specattn.engine.ranks import decide

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from specattn.engine.policy import Policy

# what must be one for all: the sizes of tables and pools, and what a draft state holds
_SHARED = (*TABLE_SIZES, "draft_sampling")
# steps that acceptance is measured over
_WINDOW = 256
# texts that their lengths, and the times of their prompts, are averaged over
_TEXTS = 64


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
    buckets : tuple of int
    ranks : ProcessGroup or None
        As above.
    current : SpecConfig
        The config of the last step that was scheduled; the first config before any.
    reserve_len : int
        Slots past its length that a request needs for a step of any config.
    acceptance : dict
        By config: what its steps in the window gained, and how long its last steps took.
    resting : SpecConfig or None
        Plain decoding, if its steps may leave the draft out: see `let_rest`.
    bare : Acceptance or None
        What these steps gained, and took.
    drafting : bool
        Whether prompts and plain steps keep the draft up to date.
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
        self.ranks = ranks
        self.current = self.all[0]
        self.reserve_len = max(config.reserve_len for config in self.all)
        self.acceptance = {config: Acceptance(config) for config in self.all}
        self.bare: Acceptance | None = None
        self.resting: SpecConfig | None = None
        # the policy, if it lets drafts rest: to ask a protocol takes long
        self._rests: RestingPolicy | None = None
        self.drafting = True
        self.used: Counter[SpecConfig] = Counter()
        self.advanced: Counter[SpecConfig] = Counter()
        self.gained: Counter[SpecConfig] = Counter()
        self.buckets = tuple(buckets)
        self._window = window
        self._recent: deque[tuple[Acceptance, list[int], int, float | None]] = deque()
        # of late: seconds of prompts, and these; tokens, and the texts that have ended
        self._prompts = self._begun = self._tokens = self._ended = 0.0

    @property
    def most_steps(self) -> int:
        """The depth of the deepest config."""
        return max(config.num_steps for config in self.all)

    @property
    def widest(self) -> SpecConfig:
        """The config that needs most proposals to start from."""
        return max(self.all, key=lambda config: config.proposals)

    @classmethod
    def of(
        cls,
        config: SpecConfig,
        others: Sequence[SpecConfig],
        policy: Policy | None,
        buckets: Sequence[int] | None,
        *,
        draft_len: Callable[[SpecConfig], int],
        ranks: ProcessGroup | None,
    ) -> Self:
        """Return an engine's, of what its caller gave.

        Plain decoding is always a choice of what lets drafts rest. ``draft_len`` says what a
        config's drafts reserve, see `Proposer.draft_len`.

        Raises
        ------
        ValueError
            As above; if there is something else than a `SpecConfig` among the configs, or than a
            whole number among the buckets.
        """
        instance("config", config, SpecConfig, "a SpecConfig")
        given = [config, *listed("configs", others, "SpecConfig")]
        for one in given:
            instance("every one of configs", one, SpecConfig, "a SpecConfig")
        chooses = policy is None or isinstance(policy, RestingPolicy)
        if chooses and len(set(given)) > 1 and all(one.num_steps for one in given):
            given.append(config.plain())
        if buckets is None:
            buckets = powers_of_two(config.max_num_reqs)
        sizes = listed("buckets", buckets, "batch sizes")
        whole_numbers("every bucket", sizes)
        configs = [one.reserving(draft_len(one)) for one in given]
        return cls(configs, policy, sizes, ranks=ranks)

    def let_rest(self) -> None:
        """Let plain steps and prompts leave the draft out.

        They do if the policy says so. Where plain decoding is none of the configs, or the policy
        has no say in it, they never do.
        """
        if self.adaptive and isinstance(self.policy, RestingPolicy):
            self.resting = next((one for one in self.all if not one.num_steps), None)
            self._rests = self.policy
        if self.resting is not None:
            self.bare = Acceptance(self.resting)

    def choose(self, rooms: Sequence[int], ready: int | None = None) -> SpecConfig:
        """Ask the policy for the config of the next step.

        Parameters
        ----------
        rooms : sequence of int
            Slots that the contexts of the requests that take part have left. Where no config fits
            the shortest request, the current one is returned, and the policy is not asked.
        ready : int, optional
            How many of them have a draft that has read their texts; None is all.

        Raises
        ------
        ValueError
            If the policy returns a config that it was not given.
        """
        fitting = self._fitting(max(rooms, default=0))
        if not fitting:
            return self.current
        observed = self._observe(len(rooms), fitting, ready)
        config, self.drafting = decide(self.ranks, partial(self._ask, observed))
        if config not in fitting:
            raise ValueError(f"policy must return one of the configs it is given, got {config}")
        return config

    def prepare(self, batch: int) -> None:
        """Ask whether prompts of a batch of so many run the draft."""
        if self.bare is not None:
            observed = self._observe(batch, self.all, None)
            self.drafting = decide(self.ranks, partial(self._drafts, observed))

    def _observe(self, batch: int, configs: tuple[SpecConfig, ...], ready: int | None) -> Observed:
        # how long texts are is known when some have ended: the first to end are the shortest
        prompts = self._prompts / self._begun if self._begun else 0.0
        per_text = self._tokens / self._ended if self._ended else 0.0
        return Observed(
            batch,
            self._bucket(batch),
            self.current,
            configs,
            self.acceptance,
            self.bare,
            ready,
            prompts / per_text if per_text else 0.0,
        )

    def _drafts(self, observed: Observed) -> bool:
        assert self._rests is not None
        return self._rests.drafts(observed)

    def _ask(self, observed: Observed) -> tuple[SpecConfig, bool]:
        """Return the policy's config, and whether drafts do not rest."""
        config = self.policy(observed)
        return config, self.bare is None or self._drafts(observed)

    def leaves_out(self, config: SpecConfig, ready: int) -> bool:
        """Whether a step leaves the draft out, with so many requests ready."""
        return config == self.resting and not (self.drafting and ready)

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
        self,
        config: SpecConfig,
        gained: Sequence[int],
        handed_out: int,
        seconds: float | None,
        ready: Sequence[bool] | None = None,
        *,
        bare: bool = False,
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
        ready : sequence of bool, optional
            Whose draft had read their texts: others' gains say nothing of the config. None is all.
        bare : bool
            Whether the step left the draft out.
        """
        found = self.bare if bare else self.acceptance.get(config)
        if found is None or not any(gained):
            return
        self.used[config] += 1
        self.advanced[config] += sum(map(bool, gained))
        self.gained[config] += handed_out
        if not self.adaptive:
            return
        self._tokens += handed_out
        told = [True] * len(gained) if ready is None or bare else ready
        kept = [tokens for tokens, tells in zip(gained, told, strict=True) if tokens and tells]
        bucket = self._bucket(len(gained))
        found.add(kept)
        found.timed(bucket, seconds)
        self._recent.append((found, kept, bucket, seconds))
        if len(self._recent) > self._window:
            old, tokens, bucket, seconds = self._recent.popleft()
            old.add(tokens, -1)
            old.timed(bucket, seconds, -1)

    def prompt_took(self, seconds: float) -> None:
        """Note how long a prompt took."""
        fade = 1 - 1 / _TEXTS
        self._prompts, self._begun = fade * self._prompts + seconds, fade * self._begun + 1

    def ended(self, texts: int) -> None:
        """Note that so many texts have ended."""
        fade = (1 - 1 / _TEXTS) ** texts
        self._tokens, self._ended = fade * self._tokens, fade * self._ended + texts

    def _bucket(self, batch: int) -> int:
        return min((size for size in self.buckets if size >= batch), default=batch)


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
