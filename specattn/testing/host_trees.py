"""The rules of proposers on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specattn.engine.engine import Engine
from specattn.engine.request import Request
from specattn.errors import TreeError
from specattn.speculative.proposers.host import HostProposer, HostTree, checked_trees
from specattn.testing.oracle import ConformanceError, require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specattn.engine.request import RequestOutput
    from specattn.testing.world import World

TREES = "trees of the host"
DRAFTS = "same drafts"
WRITTEN = "it has written into the tokens of a request"


class Known:
    """A request as a proposer sees it; its text is its prompt."""

    def __init__(self, text: Sequence[int]) -> None:
        self.tokens, self.prompt_len, self.ended = [*text], len(text), False


def whole_trees(world: World) -> None:
    """Trees are the config's up to a context's end; no text changes."""
    engine = world.engine
    context = engine.config.max_context_len
    requests = [
        Request(world.text(length), 16, ignore_eos=True)
        for length in (1, 2, 23, context - engine.config.reserve_len - 2)
    ]
    plain = Engine(engine.target.model, None, engine.config.plain(), graphs=False)
    want = [result.tokens for result in plain.generate(requests)]
    results = [result for some in (requests[:3], requests[3:]) for result in _decode(engine, some)]
    same = [result.tokens for result in results] == want
    require(same, "texts are not those of plain decoding")


def _decode(engine: Engine, requests: Sequence[Request]) -> list[RequestOutput]:
    """Decode requests whose proposer may write into their texts."""
    results = engine.add(requests)
    running = list(engine.running)
    while engine.num_running:
        try:
            engine.step()
        except (TreeError, ValueError) as error:
            raise ConformanceError(TREES, str(error)) from error
        for one in running:
            same = one.tokens == [*one.request.prompt, *one.result.tokens]
            require(same, WRITTEN, TREES)
    return results


def same_trees(world: World) -> None:
    """A tree follows from its text, whatever the order and company."""
    texts = world.repeating(5, 3, 4)
    # what a request gains differs
    stepped = [Known(text[: len(text) - gain]) for gain, text in enumerate(texts, 1)]
    _draft(world, stepped)
    for one, text in zip(stepped, texts, strict=True):
        one.tokens += text[len(one.tokens) :]
    new = [Known(text) for text in texts]
    # a proposer may learn from whatever it is shown
    for shown in (stepped, new):
        _draft(world, shown)
    alone = [_draft(world, [one])[0] for one in new]
    for gain, (one, want) in enumerate(zip(stepped, alone, strict=True), 1):
        _same(_draft(world, [one]), [want], f"a request with {gain} new tokens", "a prompt")
    for order in ([0, 1, 2], [2], [1, 0], [2, 0, 1]):
        found = _draft(world, [stepped[at] for at in order])
        _same(found, [alone[at] for at in order], "request", "alone it")
    _ended(world, texts[0])
    for _ in range(20):
        later = [Known(texts[1]) for _ in range(3)]
        _same(_draft(world, later), [alone[1]] * 3, "a request after others ended", "before it")
        new += later


def _ended(world: World, text: Sequence[int]) -> None:
    """Let requests come and end; Python gives their memory to others."""
    gone = [Known(text) for _ in range(60)]
    for at in range(0, len(gone), 3):
        _draft(world, gone[at : at + 3])
    for one in gone:
        one.ended = True


def _draft(world: World, requests: Sequence[Known]) -> list[HostTree]:
    """Ask for trees; return copies, for the next call may change them."""
    engine = world.engine
    assert isinstance(engine.proposer, HostProposer)
    before = [list(one.tokens) for one in requests]
    trees = engine.proposer.draft(tuple(requests), engine.config)
    require([one.tokens for one in requests] == before, WRITTEN, TREES)
    many = f"there are {len(trees)} for {len(requests)} requests"
    require(len(trees) == len(requests), many, TREES)
    vocab = engine.target.model.vocab_size
    try:
        return checked_trees(engine.proposer, trees, engine.config, vocab)
    except (TreeError, ValueError) as error:
        raise ConformanceError(TREES, str(error)) from error


def _same(found: list[HostTree], wanted: list[HostTree], who: str, other: str) -> None:
    for place, (tree, want) in enumerate(zip(found, wanted, strict=True)):
        one = f"{who} {place} of {len(found)}" if who == "request" else who
        said = f"{one} gets {_said(tree)}, {other} gets {_said(want)}"
        require(tree == want, f"{said}: a tree must follow from its text alone")


def _said(tree: HostTree) -> str:
    return f"tokens {list(tree.tokens)} below nodes {list(tree.parents or ())}"
