"""What a soak holds its requests against, and what it refuses."""

from __future__ import annotations

import resource
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from specattn.cli.compare import top2_margin

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specattn.engine.engine import Engine
    from specattn.engine.request import Request, RequestOutput

# float32: a first difference may stand where the two best logits are this close
MARGIN = 1e-3
# and a drawn token where a coin is at the edge of two; by how many of all drawn texts
DRAWN_APART = 0.01
# KiB that the host may need after the warm-up, for what the checks remember among others
HOST = 256 << 10


@dataclass(frozen=True)
class Wanted:
    """What a kind's requests come to, and what the steps gain of a fixed setting.

    ``logprobs`` are the tokens' own, if the kind asks for them.
    """

    tokens: list[int]
    accept_lens: list[int]
    logprobs: list[float]


@dataclass
class Found:
    """What the checks have seen so far."""

    requests: int = 0
    dropped: int = 0
    # tokens of whole steps of one setting, and those of the runs that texts are held against
    gained: int = 0
    gained_fresh: int = 0
    tokens: int = 0
    greedy: int = 0
    drawn: int = 0
    greedy_apart: int = 0
    drawn_apart: int = 0
    largest_margin: float = 0.0
    largest_logprob_error: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)


def greedy_texts(plain: Engine, kinds: Sequence[Request]) -> dict[int, RequestOutput]:
    """Return plain decoding's texts of greedy kinds, by place."""
    greedy = [at for at, kind in enumerate(kinds) if not kind.sampling.temperature]
    return dict(zip(greedy, plain.generate([kinds[at] for at in greedy]), strict=True))


def wanted(
    fresh: Engine, texts: Mapping[int, RequestOutput], kinds: Sequence[Request]
) -> list[Wanted]:
    """Run every kind to its end: greedy texts are those of plain decoding."""
    found = []
    for at, own in enumerate(fresh.generate(kinds)):
        text = texts.get(at, own)
        logprobs = [one.value for one in text.logprobs]
        found.append(Wanted(text.tokens, own.accept_lens, logprobs))
    return found


def compare(
    kind: Request, want: Wanted, result: RequestOutput, plain: Engine, found: Found, *, fixed: bool
) -> None:
    """Hold a text against its kind's; with a fixed setting drawn ones, too, and what steps gain.

    Raises
    ------
    AssertionError
        If a greedy text departs where plain decoding was decided.
    """
    found.requests += 1
    found.tokens += len(result.tokens)
    found.reasons[result.finish_reason] = found.reasons.get(result.finish_reason, 0) + 1
    pairs = list(zip(result.tokens, want.tokens, strict=False))
    first = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    if not kind.sampling.temperature:
        found.greedy += 1
        if first is not None:
            margin = _margin(plain, kind, want.tokens[:first])
            assert margin < MARGIN, (
                f"token {first} after {kind.prompt[:8]}...: {pairs[first]}, margin {margin}"
            )
            found.greedy_apart += 1
            found.largest_margin = max(found.largest_margin, margin)
    elif fixed:
        found.drawn += 1
        found.drawn_apart += first is not None
    else:
        return
    if fixed and first is None:
        # an end cuts what the last step gained
        whole = result.accept_lens[:-1]
        found.gained += sum(whole)
        found.gained_fresh += sum(want.accept_lens[: len(whole)])
    scored = zip(result.logprobs[:first], want.logprobs, strict=False)
    error = max((abs(one.value - own) for one, own in scored), default=0.0)
    found.largest_logprob_error = max(found.largest_logprob_error, error)


def _margin(plain: Engine, kind: Request, tokens: Sequence[int]) -> float:
    """Return the difference of the two best logits after a greedy text's first tokens."""
    if not kind.sampling.processed:
        return top2_margin(plain, [*kind.prompt, *tokens])
    # processors tell a prompt from an output, so plain decoding writes that again
    scored = replace(kind.sampling, logprobs=2, logprobs_of="processed")
    (result,) = plain.generate([replace(kind, max_new_tokens=len(tokens) + 1, sampling=scored)])
    best, second = result.logprobs[-1].alternatives.values()
    return best - second


def memory() -> dict[str, int]:
    """Return device bytes in use and held, and the most that the process held, in KiB."""
    found = {"rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        found |= {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }
    return found


def judge_memory(report: dict[str, Any]) -> None:
    """Raise an AssertionError if device or host need more than after the warm-up."""
    grown = report["memory_end"].get("allocated", 0) - report["memory_warm"].get("allocated", 0)
    assert grown <= 1 << 20, f"{grown} bytes more are in use than after the warm-up"
    held = report["memory_end"].get("reserved", 0) - report["memory_warm"].get("reserved", 0)
    assert held <= 64 << 20, f"{held} bytes more are held than after the warm-up"
    host = report["memory_end"].get("rss_kib", 0) - report["memory_warm"].get("rss_kib", 0)
    assert host <= HOST, f"the host has {host} KiB more than after the warm-up"


def judge_texts(part: Mapping[str, Any]) -> None:
    """Raise an AssertionError if steps gain less or more, or drawn texts or their scores differ."""
    error = part["largest_logprob_error"]
    assert error < MARGIN, f"log-probabilities differ by {error}"
    gained, fresh = part["gained"], part["gained_fresh"]
    assert abs(gained - fresh) <= 0.01 * fresh, f"steps gained {gained} tokens, alone {fresh}"
    allowed = max(1, DRAWN_APART * part["drawn"])
    assert part["drawn_apart"] <= allowed, f"{part['drawn_apart']} drawn texts differ"


def judge_steps(counted: Mapping[str, Any]) -> None:
    """Raise an AssertionError if steps waited for more than tokens, or allocated."""
    allocated = {name: count for name, count in counted["allocations"].items() if count}
    assert not allocated, f"steps allocated: {allocated}"
    assert not counted["launch_waits"], f"launches waited {counted['launch_waits']} times"
    steps = counted["steps"]
    assert counted["waits"] <= steps, f"{steps} steps waited {counted['waits']} times"
