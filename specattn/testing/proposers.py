"""The proposers' part of the conformance kit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.speculative.proposers.host import HostProposer
from specattn.speculative.step.step import Step
from specattn.testing.host_trees import DRAFTS, TREES, same_trees, whole_trees
from specattn.testing.kit import Check
from specattn.testing.no_reads import NoReads
from specattn.testing.oracle import require
from specattn.testing.world import Follower, World, accept, caches, paths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from specattn.speculative.model import TargetModel

#: The chain and the tree that proposers are checked with, unless others are asked for.
CONFIGS = (SpecConfig(3, 1, 4, 128, 3), SpecConfig(3, 2, 7, 128, 3, page_size=4))
#: Relative error that the order of sums may cause in float32.
TOLERANCE = 2e-5


def proposer_conformance(
    draft: Any,
    target: TargetModel,
    *,
    configs: Sequence[SpecConfig] = CONFIGS,
    backend: str = "torch_native",
) -> Iterator[Check]:
    """Yield a check per rule and config.

    Parameters
    ----------
    draft : DraftModel, BlockDraftModel or ProposerFactory
        What `Engine` takes; a `Proposer` only if it has no pool, since every check has its own.
    target : TargetModel
        A target in float32 that gives the features which the draft reads.
    configs : sequence of SpecConfig
        The trees, each with room for three requests and contexts of 128 tokens.
    backend : str
        The attention of both models.
    """
    rules = {
        "chunks": ("prompts in chunks", _chunks),
        "prefix": ("cached prefixes", _prefix),
        "launched": ("prompts as captures", _launched),
        "steps": ("step by step", _steps),
        "repeats": ("step by step", _repeats),
        "host": ("host reads", _host_reads),
        "window": ("writes outside the window", _writes),
        "garbage": ("rows past the accepted", _garbage),
    }
    if isinstance(draft, HostProposer):
        # it keeps nothing on the device
        rules = {"trees": (TREES, whole_trees), "drafts": (DRAFTS, same_trees)}
    name = type(draft).__name__
    for config in configs:
        shape = f"{config.num_steps}x{config.topk}x{config.num_draft_tokens}"
        options: dict[str, Any] = {"backend": backend, "graphs": False, "buckets": [1]}
        make = partial(Engine, draft=draft, config=config, **options)
        for rule, (broken, body) in rules.items():
            run = partial(_run, body, make, target)
            yield Check(f"{rule}-{shape}", broken, name, run, role="proposer")


@torch.no_grad()
def _run(body: Callable[[World], None], make: Callable[[Any], Engine], target: TargetModel) -> None:
    follower = Follower(target)
    engine = make(follower)
    for cache in caches(engine.draft).values():
        cache[engine.config.page_size :] = torch.nan
    body(World(engine, follower.next_ids))


def _alone(world: World, texts: list[list[int]]) -> list[dict[str, Tensor]]:
    """Return what prompts leave one by one; their rows are free."""
    found = []
    for text in texts:
        row = world.row()
        world.prompts([row], [text])
        found.append(world.kept(row, len(text)))
        world.engine.table.free(row)
    return found


def _launched(world: World) -> None:
    """Prompts one by one, and as pieces of captured chunks."""
    texts = [world.text(count) for count in (23, 9, 4)]
    want, rows = _alone(world, texts), [world.row() for _ in texts]
    # the last chunk has pieces and places of padding
    if world.launched(rows, texts, bucket=13) is None:
        return
    for at, (row, text) in enumerate(zip(rows, texts, strict=True)):
        where = f" of prompt {at} of {len(rows)}, in captured chunks of 13,"
        _compare(want[at], world.kept(row, len(text)), where=where)
    # the same behind tokens that are there, whose next one is known
    world.engine.table.free(rows[0])
    other = world.row()
    world.launched([other], [texts[0][:14]], bucket=13)
    world.launched([other], [texts[0]], bucket=13, cached=13)
    _compare(want[0], world.kept(other, len(texts[0])), where=" behind cached tokens")


def _chunks(world: World) -> None:
    """Prompts one by one, and together in pieces."""
    texts = [world.text(count) for count in (23, 9, 4)]
    want, rows = _alone(world, texts), [world.row() for _ in texts]
    # two of them end in the last piece
    world.prompts(rows, texts, chunk=12)
    for at, (row, text) in enumerate(zip(rows, texts, strict=True)):
        where = f" of prompt {at} of {len(rows)}, in chunks of 12,"
        _compare(want[at], world.kept(row, len(text)), where=where)


def _prefix(world: World) -> None:
    """A prompt whole, and behind cached tokens."""
    tokens, rows = world.text(23), (world.row(), world.row())
    world.prompts(rows[:1], [tokens])
    # the token after what is cached is known
    world.prompts(rows[1:], [tokens[:14]])
    world.prompts(rows[1:], [tokens], cached=13)
    _compare(*(world.kept(row, len(tokens)) for row in rows))


# who takes part in each step: all, one over the first rows, some beside padding
_COMPANY = ([0, 1, 2], [2], [1, 0])


def _steps(world: World) -> None:
    """Texts that go on as the target does."""
    _stepped(world, world.repeating(4, 3, 5))


def _repeats(world: World) -> None:
    """Texts that repeat themselves: drafts are kept, whole and in part."""
    _stepped(world, world.followed(4, 3, 5))


def _stepped(world: World, texts: list[list[int]]) -> None:
    """Texts by steps in changing company, and the same texts as prompts."""
    rows = [world.row() for _ in texts]
    for row, text in zip(rows, texts, strict=True):
        text += world.prompts([row], [text])
    step = world.bound(rows, [len(text) - 1 for text in texts])
    first = Step(step.setup, step.host.of(0, 1), step.packed[:1], step.arena)
    for who in _COMPANY:
        some = [rows[at] for at in who], [len(texts[at]) - 1 for at in who]
        alone = [world.drafted(*one) for one in zip(*some, strict=True)]
        for row, length in zip(*some, strict=True):
            world.spoil(row, length)
        gained = _step(world, first if len(who) == 1 else step, some, alone)
        for at, tokens in zip(who, gained, strict=True):
            texts[at] += tokens
    _prompted(world, rows, texts)


def _step(
    world: World, step: Step, some: tuple[list[int], list[int]], alone: list[list[list[int]]]
) -> list[list[int]]:
    """Run a step; hold its trees to those drafted alone."""
    world.begin(step, *some)
    tree = world.tree(step)
    for place, (want, got) in enumerate(zip(alone, paths(tree), strict=False)):
        _same_paths(got, want, f"request {place} of {len(alone)}", "alone over new buffers")
    accepted = accept(step, tree)
    step.advance(accepted, step.extend(accepted))
    gained = zip(accepted.accept_tokens.tolist(), accepted.accept_lens.tolist(), strict=True)
    return [tokens[:count] for tokens, count in gained][: len(alone)]


def _prompted(world: World, rows: list[int], texts: list[list[int]]) -> None:
    """Hold what steps have left to what prompts leave."""
    lens = [len(text) - 1 for text in texts]
    kept = [world.kept(*one) for one in zip(rows, lens, strict=True)]
    drafted = [world.drafted(*one) for one in zip(rows, lens, strict=True)]
    # every request gets the row of another one
    for at in (0, 2, 1):
        world.engine.table.free(rows[at])
    for at, text in enumerate(texts):
        row = world.row()
        (bonus,) = world.prompts([row], [text[:-1]])
        require(bonus == text[-1], f"token {bonus}, a step gave {text[-1]}")
        who = f"request {at}, whose text was a prompt,"
        _compare(world.kept(row, lens[at]), kept[at], where=f" of {who}")
        _same_paths(world.drafted(row, lens[at]), drafted[at], who, "after steps")


def _same_paths(got: list[list[int]], want: list[list[int]], who: str, other: str) -> None:
    said = f"{who} is drafted {got}, {other} {want}: a draft must follow from its text alone"
    require(got == want, said, DRAFTS)


def _host_reads(world: World) -> None:
    """No value is read on the host."""
    tokens, row = world.text(9), world.row()
    world.prompts([row], [tokens])
    step = world.bound([row], [len(tokens)])
    with NoReads():
        proposal = step.propose()
    accepted = accept(step, step.build_tree(proposal))
    with NoReads():
        step.extend(accepted)


def _writes(world: World) -> None:
    """Keys and values are written to the window's first columns alone."""
    engine, tokens, row, other = world.engine, world.text(9), world.row(), world.row()
    world.prompts([other, row], [world.text(6), tokens])
    step = world.bound([row], [len(tokens)])
    columns = engine.proposer.draft_len(engine.config)
    allowed = {*step.buffers.window[0, :columns].tolist(), *range(engine.config.page_size)}
    before = _everything(world, other)
    proposal = step.propose()
    _only(allowed, before, _everything(world, other))
    accepted = accept(step, step.build_tree(proposal))
    before = _everything(world, other)
    step.extend(accepted)
    _only(allowed, before, _everything(world, other))


def _garbage(world: World) -> None:
    """What is kept does not depend on rows past the accepted ones."""
    texts, rows = [world.text(count) for count in (9, 6, 12)], [world.row() for _ in range(3)]
    for text, token in zip(texts, world.prompts(rows, texts), strict=True):
        text.append(token)
    for _ in range(2):
        step = world.bound(rows, [len(text) - 1 for text in texts])
        accepted = accept(step, world.tree(step))
        gains = accepted.accept_lens.tolist()
        for text, tokens, gain in zip(texts, accepted.accept_tokens.tolist(), gains, strict=True):
            text += tokens[:gain]
        state = step.extend(accepted)
        found = [_left(world, rows, texts, state)]
        spoiled = accepted.accept_tokens.clone()
        for at, gain in enumerate(gains):
            spoiled[at, gain:] = 1
            step.buffers.features[at, gain:] = 1.0
        state = step.extend(replace(accepted, accept_tokens=spoiled))
        found.append(_left(world, rows, texts, state))
        _compare(*found)
        step.advance(accepted, state)


def _left(
    world: World, rows: list[int], texts: list[list[int]], state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the states of an extend, and what every request keeps."""
    found = {name: new.clone() for name, new in state.items()}
    for row, text in zip(rows, texts, strict=True):
        for name, kept in world.kept(row, len(text) - 1).items():
            found[f"{name} of row {row}"] = kept
    return found


def _compare(want: dict[str, Tensor], got: dict[str, Tensor], *, where: str = "") -> None:
    for name, one in want.items():
        other = got[name]
        if not one.is_floating_point():
            same = torch.equal(one, other)
        else:
            same = bool((other.double() - one.double()).norm() <= TOLERANCE * one.double().norm())
        require(same, f"{name}{where} differs")


def _everything(world: World, other: int) -> dict[str, Tensor]:
    """Return copies of both models' pools, and of another request's states."""
    engine, found = world.engine, {}
    for model, one in (("target", engine.target), ("draft", engine.draft)):
        for name, cache in caches(one).items():
            found[f"{name} of the {model}"] = cache.clone()
    for name, table in engine.states.tensors().items():
        found[name] = table[other].clone()
    return found


def _only(allowed: set[int], before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Refuse changes anywhere but in the draft's slots of ``allowed``."""
    for name, old in before.items():
        new = after[name]
        changed = ~((old == new) | (old.isnan() & new.isnan()))
        if name.endswith("of the draft"):
            at = set(changed.flatten(1).any(1).nonzero()[:, 0].tolist()) - allowed
        else:
            at = {0} if changed.any() else set()
        require(not at, f"{name} changed at {sorted(at)[:5]}")
