"""Whether texts under load are right: only then is anything timed.

What a request gets must not depend on who else is there. So some requests run again, alone, in the
same engine, greedily. In float32 their texts must be equal, token for token.

In 16 bits they need not be, and no option makes them: attention can be deterministic, but products
of other counts of rows round otherwise, and a random model's best two tokens are within a rounding
of each other at about every tenth token. Then the texts under load must be what the target would
have written but for rounding: each is read by the target again, in one forward by itself with keys
and values of its own, and no token's logit may be below the best one's by more than a part of the
logits' spread. A token after another text, or from another request's keys, misses the best by some
four spreads. Of steps whose lengths are forced the tokens between are the draft's; there the first
token and the last one of every step are compared. How many texts were equal is said, too.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from specattn.cache.kv_pool import KVPool
from specattn.plan import ExtendPlan
from specattn.speculative.model import ModelSlot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.load.client import Text
    from specattn.engine.engine import Engine
    from specattn.speculative.model import TargetModel

#: How far below the best a token's logit may be in 16 bits, in standard deviations of all logits.
#: Two computations of 8B models were up to 0.2 apart.
MOST_MISSED = 0.5


class WrongTexts(AssertionError):
    """Texts under load that are not what the target writes."""


def check(engine: Engine, texts: Sequence[Text], lowest: int = 0) -> dict[str, Any]:
    """Compare texts under load with those of their requests alone.

    Parameters
    ----------
    engine : Engine
        It has no requests.
    texts : sequence of Text
        From the engine, under load, greedy.
    lowest : int
        Where lengths are forced: what tokens of the target below it become (`Forced`).

    Returns
    -------
    dict
        How many were compared and equal, and the most that a token's logit missed the best by.

    Raises
    ------
    WrongTexts
        See above.
    """
    alone = [engine.generate([text.request])[0].tokens for text in texts]
    equal = sum(text.tokens == tokens for text, tokens in zip(texts, alone, strict=True))
    target = engine.target.model
    worst = max(missed(target, text, lowest) for text in texts)
    found = {"checked": len(texts), "equal_alone": equal, "missed": round(worst, 4)}
    if target.dtype == torch.float32 and equal < len(texts):
        raise WrongTexts(f"{len(texts) - equal} of {len(texts)} texts are others alone")
    # NaN is no number below
    if not worst <= MOST_MISSED:
        raise WrongTexts(f"a token's logit is {worst:.2f} spreads below the best: {found}")
    return found


def missed(target: TargetModel, text: Text, lowest: int) -> float:
    """Return by how many spreads of its logits a text's worst token misses the best one."""
    logits = logits_before(target, text.request.prompt, text.tokens)
    own = logits.gather(1, torch.tensor(text.tokens, device=logits.device)[:, None])[:, 0]
    places = list(range(len(text.tokens)))
    if lowest:
        # the last step may be cut
        places = [0, *accumulate(text.accept_lens[:-1])]
        for at in places[1:]:
            if text.tokens[at] <= lowest:
                below = text.tokens[at] < lowest
                own[at] = -torch.inf if below else logits[at, : lowest + 1].max()
    gaps = (logits.amax(1) - own) / logits.std(1)
    return float(gaps[places].max())


@torch.no_grad()
def logits_before(
    target: TargetModel, prompt: Sequence[int], answer: Sequence[int]
) -> torch.Tensor:
    """Return the target's logits before every token of an answer, ``[n, V]`` float32."""
    device, ids = target.device, [*prompt, *answer[:-1]]
    count = len(ids)
    pool = KVPool(target.layers, count + 1, device)
    slot: ModelSlot[TargetModel] = ModelSlot.of(target, pool, "auto")
    # row 0 and slot 0 are padding's
    slots = torch.arange(1, count + 1, dtype=torch.int32, device=device)
    plan = ExtendPlan(
        req_to_token=torch.stack([slots * 0, slots]),
        req_pool_indices=torch.tensor([1], device=device),
        seq_lens=torch.zeros(1, dtype=torch.int32, device=device),
        qo_indptr=torch.tensor([0, count], dtype=torch.int32, device=device),
        out_slots=slots[None],
        max_q_len=count,
        max_seq_len=count,
    )
    places = torch.arange(count, device=device)
    attend = slot.backend.bind_prompts(plan, [0])
    tokens = torch.tensor(ids, device=device)
    return target.forward(tokens, places, attend, places[len(prompt) - 1 :]).logits.float()
