"""The proposers' part of the conformance kit."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specattn.config import SpecConfig
from specattn.engine.engine import Engine
from specattn.engine.request import Request
from specattn.errors import TreeError
from specattn.speculative.host_proposer import HostProposer
from specattn.speculative.prefill import Prefill, Prompt
from specattn.speculative.sampling import SamplingBatch, SamplingParams
from specattn.testing.kit import Check
from specattn.testing.oracle import ConformanceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from specattn.batch import AcceptResult
    from specattn.engine.request import RequestOutput
    from specattn.speculative.model import TargetModel
    from specattn.speculative.step import Step

#: The chain and the tree that proposers are checked with, unless others are asked for.
CONFIGS = (SpecConfig(3, 1, 4, 128, 3), SpecConfig(3, 2, 7, 128, 3, page_size=4))
#: Relative error that the order of sums may cause in float32.
TOLERANCE = 2e-5
# the rule of proposers on the host
_TREES = "trees of the host"
# what waits for the device, or has a shape that depends on values
_READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")
# rooms whose torch versions may read what their kernels do not
_ROOMS = ("specattn.kernels", "specattn.backends")


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
    draft : DraftModel, Proposer or ProposerFactory
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
        "steps": ("step by step", _steps),
        "host": ("host reads", _host_reads),
        "window": ("writes outside the window", _writes),
        "garbage": ("rows past the accepted", _garbage),
    }
    if isinstance(draft, HostProposer):
        # it keeps nothing on the device
        rules = {"trees": (_TREES, _host_trees)}
    name = type(draft).__name__
    for config in configs:
        shape = f"{config.num_steps}x{config.topk}x{config.num_draft_tokens}"
        for rule, (broken, body) in rules.items():
            run = partial(_run, body, draft, target, config, backend)
            yield Check(f"{rule}-{shape}", broken, name, run, role="proposer")


@dataclass(frozen=True)
class _World:
    """An engine whose rows the checks run by themselves."""

    engine: Engine

    def row(self) -> int:
        return self.engine.table.allocate()

    @property
    def lead(self) -> int:
        assert self.engine.proposer is not None
        return self.engine.proposer.lead

    def prompt(self, row: int, tokens: Sequence[int], *, cached: int = 0, chunk: int = 4096) -> int:
        """Run a prompt and admit the row; return its first new token."""
        engine, device = self.engine, self.engine.table.req_to_token.device
        engine.table.reserve([row], [len(tokens) + self.lead])
        sampling = SamplingBatch.of((SamplingParams(),), device)
        prefill = Prefill(
            engine.target, engine.proposer, engine.table.req_to_token, engine.config, chunk
        )
        out = prefill.run([Prompt(row, tokens, cached)], sampling)
        lens = torch.tensor([len(tokens)], dtype=torch.int32, device=device)
        where = torch.tensor([row], device=device)
        engine.states.admit(where, lens, out.bonus_tokens, out.state, sampling)
        engine.table.commit(row, len(tokens))
        return int(out.bonus_tokens)

    def reserve(self, row: int, length: int) -> None:
        self.engine.table.reserve([row], [length + self.engine.config.reserve_len])

    def begun(self, row: int, length: int) -> Step:
        """Return a step of one row that has begun."""
        self.reserve(row, length)
        step = self.engine.decoder(self.engine.config).phases([row])
        step.begin()
        return step

    def kept(self, row: int, length: int) -> dict[str, Tensor]:
        """Return what the proposer keeps of a request: keys, values and states."""
        engine, found = self.engine, {}
        slots = engine.table.req_to_token[row, : length + self.lead].long()
        if engine.draft is not None:
            for name, caches in (("k", engine.draft.pool.k), ("v", engine.draft.pool.v)):
                for layer, cache in enumerate(caches):
                    found[f"{name} of layer {layer}"] = cache[slots].clone()
        for name, table in engine.states.drafting.items():
            # a field as wide as a context holds its tokens, the newest without a slot among them
            context = engine.table.max_context_len
            text = table.dtype in (torch.int32, torch.int64) and table.shape[1] - context in (0, 1)
            found[name] = table[row, : length if text else None].clone()
        return found


def _run(
    body: Callable[[_World], None],
    draft: Any,
    target: TargetModel,
    config: SpecConfig,
    backend: str,
) -> None:
    engine = Engine(target, draft, config, backend=backend, graphs=False, buckets=[1])
    if engine.draft is not None:
        for cache in (*engine.draft.pool.k, *engine.draft.pool.v):
            cache[config.page_size :] = torch.nan
    body(_World(engine))


def _text(world: _World, count: int) -> list[int]:
    vocab = world.engine.target.model.vocab_size
    tokens: list[int] = torch.randint(1, vocab, (count,)).tolist()
    return tokens


def _chunks(world: _World) -> None:
    """A prompt whole and in pieces."""
    tokens, rows = _text(world, 23), (world.row(), world.row())
    for row, chunk in zip(rows, (4096, 5), strict=True):
        world.prompt(row, tokens, chunk=chunk)
    _compare("prompts in chunks", *(world.kept(row, len(tokens)) for row in rows))


def _prefix(world: _World) -> None:
    """A prompt whole, and behind cached tokens."""
    tokens, rows = _text(world, 23), (world.row(), world.row())
    world.prompt(rows[0], tokens)
    # the token after what is cached is known
    world.prompt(rows[1], tokens[:14])
    world.prompt(rows[1], tokens, cached=13)
    _compare("cached prefixes", *(world.kept(row, len(tokens)) for row in rows))


def _steps(world: _World) -> None:
    """A text by steps, and the same text as a prompt."""
    tokens, rows = _text(world, 9), (world.row(), world.row())
    tokens.append(world.prompt(rows[0], tokens))
    decoder = world.engine.decoder(world.engine.config)
    for _ in range(5):
        world.reserve(rows[0], len(tokens) - 1)
        tokens += decoder.step([rows[0]])[0]
    bonus = world.prompt(rows[1], tokens[:-1])
    if bonus != tokens[-1]:
        raise ConformanceError("step by step", f"token {bonus}, a step gave {tokens[-1]}")
    _compare("step by step", *(world.kept(row, len(tokens) - 1) for row in reversed(rows)))


def _host_reads(world: _World) -> None:
    """No value is read on the host."""
    tokens, row = _text(world, 9), world.row()
    world.prompt(row, tokens)
    step = world.begun(row, len(tokens))
    assert step.bound is not None
    with _NoReads():
        proposal = step.propose()
    accepted = _accept(step, proposal)
    with _NoReads():
        step.extend(accepted)


def _writes(world: _World) -> None:
    """Keys and values are written to the window's first columns alone."""
    engine, tokens, row, other = world.engine, _text(world, 9), world.row(), world.row()
    world.prompt(other, _text(world, 6))
    world.prompt(row, tokens)
    step = world.begun(row, len(tokens))
    assert engine.proposer is not None
    columns = engine.proposer.draft_len(engine.config)
    allowed = {*step.buffers.window[0, :columns].tolist(), *range(engine.config.page_size)}
    before = _everything(world, other)
    proposal = step.propose()
    _only(allowed, before, _everything(world, other))
    accepted = _accept(step, proposal)
    before = _everything(world, other)
    step.extend(accepted)
    _only(allowed, before, _everything(world, other))


def _garbage(world: _World) -> None:
    """What is kept does not depend on rows past the accepted ones."""
    tokens, row, broken = _text(world, 9), world.row(), "rows past the accepted"
    tokens.append(world.prompt(row, tokens))
    for _ in range(8):
        step = world.begun(row, len(tokens) - 1)
        accepted = _accept(step, step.propose())
        gain = int(accepted.accept_lens)
        state, length = step.extend(accepted), len(tokens) - 1 + gain
        found = [{**world.kept(row, length), **{k: v.clone() for k, v in state.items()}}]
        spoiled = accepted.accept_tokens.clone()
        spoiled[:, gain:] = 1
        step.buffers.features[:, gain:] = 1.0
        state = step.extend(replace(accepted, accept_tokens=spoiled))
        found.append({**world.kept(row, length), **state})
        _compare(broken, *found)
        step.advance(accepted, state)
        tokens += accepted.accept_tokens[0, :gain].tolist()


def _host_trees(world: _World) -> None:
    """Trees are the config's up to a context's end; no text changes."""
    engine = world.engine
    context = engine.config.max_context_len
    requests = [
        Request(_text(world, length), 32, ignore_eos=True)
        for length in (1, 2, 23, 7, context - engine.config.reserve_len - 2)
    ]
    plain = Engine(engine.target.model, None, engine.config.plain(), graphs=False)
    want = [result.tokens for result in plain.generate(requests)]
    results = [result for some in (requests[:3], requests[3:]) for result in _decode(engine, some)]
    if [result.tokens for result in results] != want:
        raise ConformanceError(_TREES, "texts are not those of plain decoding")


def _decode(engine: Engine, requests: Sequence[Request]) -> list[RequestOutput]:
    """Decode requests whose proposer may write into their texts."""
    results = engine.add(requests)
    running = list(engine.running)
    while engine.num_running:
        try:
            engine.step()
        except (TreeError, ValueError) as error:
            raise ConformanceError(_TREES, str(error)) from error
        for one in running:
            if one.tokens != [*one.request.prompt, *one.result.tokens]:
                raise ConformanceError(_TREES, "it has written into the tokens of a request")
    return results


def _accept(step: Step, proposal: Any) -> AcceptResult:
    tree = step.build_tree(proposal)
    logits, features = step.verify(tree)
    accepted = step.accept(tree, step.process(tree, logits))
    step.commit(accepted, features)
    return accepted


def _compare(broken: str, want: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    for name, one in want.items():
        other = got[name]
        if not one.is_floating_point():
            same = torch.equal(one, other)
        else:
            same = bool((other.double() - one.double()).norm() <= TOLERANCE * one.double().norm())
        if not same:
            raise ConformanceError(broken, f"{name} differs")


def _everything(world: _World, other: int) -> dict[str, Tensor]:
    """Return copies of both models' pools, and of another request's states."""
    engine, found = world.engine, {}
    slots = {"target": engine.target, "draft": engine.draft}
    for model, slot in slots.items():
        for name, caches in (("k", slot.pool.k), ("v", slot.pool.v)) if slot is not None else ():
            for layer, cache in enumerate(caches):
                found[f"{name} of layer {layer} of the {model}"] = cache.clone()
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
        if at:
            raise ConformanceError(
                "writes outside the window", f"{name} changed at {sorted(at)[:5]}"
            )


class _NoReads(TorchDispatchMode):
    """Refuses reads on the host, kernels and backends aside."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` unless it reads a value."""
        name = func.overloadpacket.__name__
        if name in _READS and not _in_rooms():
            raise ConformanceError("host reads", f"{name} reads a value, which no graph can record")
        return func(*args, **(kwargs or {}))


def _in_rooms() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_ROOMS):
            return True
        frame = frame.f_back
    return False
