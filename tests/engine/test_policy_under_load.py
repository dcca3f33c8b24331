"""A policy against every fixed setting, under load: texts come and go, and prompts take time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from specattn.config import SpecConfig
from specattn.engine.configs import SpeculativeConfigs
from tests.samples import sampled

DEEP, SHALLOW, PLAIN = SpecConfig(7, 1, 8), SpecConfig(3, 1, 4), SpecConfig(0, 1, 1)
BUCKETS = (1, 2, 4, 8, 16, 32)
#: What a forward of the draft costs in forwards of the target, and whether it has a model.
KINDS = {"lookup": (0.0, False), "EAGLE": (1 / 20, True), "a model": (1 / 4, True)}
#: The chance that a depth is kept if the one before it was: by place in the run, from 0 to 1.
RATES: dict[str, Callable[[float], float]] = {
    "bad": lambda at: 0.3,
    "fair": lambda at: 0.6,
    "good": lambda at: 0.85,
    "worse": lambda at: 0.85 if at < 0.5 else 0.2,
    "better": lambda at: 0.2 if at < 0.5 else 0.85,
}
LOADS: dict[str, Callable[[float], int]] = {
    "1": lambda at: 1,
    "8": lambda at: 8,
    "32": lambda at: 32,
    "32, then 1": lambda at: 32 if at < 0.5 else 1,
    "1, then 32": lambda at: 1 if at < 0.5 else 32,
    "1, 32, 8 and 1": lambda at: (1, 32, 8, 1)[min(int(4 * at), 3)],
}


@dataclass
class Text:
    """A request: tokens that it lacks, and whether its draft has read it."""

    left: int
    ready: bool


@dataclass
class World:
    """Costs in forwards of the target over a row; requests are replaced as they end."""

    share: float
    model: bool
    rate: Callable[[float], float]
    load: Callable[[float], int]
    # of a prompt's forward
    prompt: float = 1.4

    def step(self, config: SpecConfig, batch: int, *, bare: bool = False) -> float:
        """Return the time of a step: rows cost little, and the host something."""
        forwards = config.num_steps or (0 if bare else 1)
        rows = batch * config.num_draft_tokens
        return 0.05 + (1 + rows / 256) + forwards * self.share * (1 + batch / 256)

    def gained(
        self, dice: random.Random, config: SpecConfig, at: float, texts: list[Text]
    ) -> list[int]:
        """Return what each text gains in a step; those whose draft lags gain one token."""
        if not config.num_steps:
            return [1] * len(texts)
        # the chance of n draft tokens or more is that of one to the power of n
        rate, most = math.log(self.rate(at)), config.num_steps
        return [
            1 + min(int(math.log(1 - dice.random()) / rate), most) if text.ready else 1
            for text in texts
        ]

    def run(self, configs: SpeculativeConfigs, *, plain: bool, total: int, seed: int) -> float:
        """Return tokens per time of an engine; ``plain`` is of one without a draft."""
        dice, lens = random.Random(seed), random.Random(seed)
        noise = random.Random(seed + 1)
        texts: list[Text] = []
        time, late, tokens = 0.0, 0.0, 0
        following: SpecConfig | None = None
        while time < total:
            at = time / total
            if not plain and len(texts) < self.load(at):
                configs.prepare(self.load(at))
            while len(texts) < self.load(at):
                drafts = configs.drafting and not plain
                # in a step the draft's kernels wait for each other
                took = self.prompt * (1 + self.share * drafts / 2)
                texts.append(Text(lens.randint(80, 160), drafts))
                configs.prompt_took(took)
                time += took
            batch = len(texts)
            config = following or self.choose(configs, texts)
            bare = plain or configs.leaves_out(config, sum(text.ready for text in texts))
            took = self.step(config, batch, bare=bare)
            told = [text.ready for text in texts]
            gained = self.gained(dice, config, at, texts)
            for text in texts:
                text.ready &= not bare
            configs.current = config
            # the next step is launched before this one is read
            following = self.choose(configs, texts)
            counts = [min(new, text.left) for new, text in zip(gained, texts, strict=True)]
            # a host that is busy now and then, or late: then the next step seems shorter
            seen = took * (noise.choice((1.02, 1.05, 2.0)) if noise.random() < 0.1 else 1.0)
            earlier, late = late, took * noise.random() / 2 if noise.random() < 0.05 else 0.0
            seen += late - min(earlier, seen / 2)
            configs.count(config, gained, sum(counts), seen, told, bare=bare and not plain)
            for text, new in zip(texts, counts, strict=True):
                text.left -= new
            configs.ended(sum(text.left <= 0 for text in texts))
            texts = [text for text in texts if text.left > 0][: self.load(at)]
            time, tokens = time + took, tokens + sum(counts)
        return tokens / time

    def choose(self, configs: SpeculativeConfigs, texts: list[Text]) -> SpecConfig:
        if not configs.adaptive:
            return configs.current
        return configs.choose([999] * len(texts), sum(text.ready for text in texts))


@cache
def plain_speed(load: Callable[[float], int], prompt: float, total: int, seed: int) -> float:
    """The speed of an engine without a draft, which has neither a share nor a rate."""
    world = World(0.0, False, RATES["bad"], load, prompt)
    made = SpeculativeConfigs((PLAIN,), None, BUCKETS)
    return world.run(made, plain=True, total=total, seed=seed)


def shares(world: World, *, total: int, seed: int = 0) -> tuple[float, float, float, float]:
    """Return the speeds of the fixed settings and of an adaptive engine, over the best fixed."""

    def speed(*configs: SpecConfig) -> float:
        made = SpeculativeConfigs(configs, None, BUCKETS)
        if world.model:
            made.let_rest()
        return world.run(made, plain=False, total=total, seed=seed)

    plain = plain_speed(world.load, world.prompt, total, seed)
    fixed = [speed(DEEP), speed(SHALLOW), plain]
    adaptive = speed(DEEP, SHALLOW, PLAIN)
    return tuple(one / max(fixed) for one in (*fixed, adaptive))


def seventh(*at: int) -> bool:
    """Every seventh case."""
    return sum(step * index for step, index in zip((1, 2, 3, 3), at, strict=True)) % 7 == 0


@sampled(seventh, load=LOADS, kind=KINDS, rate=RATES, prompt=(1.4, 5.0))
def test_an_adaptive_engine_is_as_fast_as_its_best_fixed_setting(load, kind, rate, prompt):
    """Plain decoding is one of them, of an engine without the draft."""
    share, model = kind
    *_, adaptive = shares(World(share, model, rate, load, prompt), total=8000)
    # texts that become better while the draft has a long rest are noticed late
    assert adaptive >= (0.95 if rate is RATES["better"] else 0.97)
