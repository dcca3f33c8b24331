"""Texts that targets of random weights are made to write, as predictable as real ones.

A text repeats parts of itself, so that prompt lookup finds them, and at a share of its places the
target writes what the draft says there. Both go by position: whatever a step's depth, or whoever
runs beside it, the same places are kept. So drafts gain about what they gain on HumanEval's answers
(docs/published.md), in passages, and a policy has something to choose by.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from bench.load.check import WrongTexts
from bench.step_forced import launch, twin
from specattn.speculative.step.verify import accept

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.load.client import Text
    from specattn.batch import AcceptResult, DraftTree
    from specattn.config import SpecConfig
    from specattn.speculative.sampling.params import SamplingBatch

    Tensor = torch.Tensor

#: Positions that are known.
LENGTH = 2048
#: Tokens that are new, and tokens that repeat what was before, in turn.
NEW, REPEATED = 12, 40
#: A logit that decides, in 16 bits too.
CERTAIN = 1e4


class Written:
    """A text by position, and where a draft is right about it.

    Parameters
    ----------
    vocab_size : int
        Tokens are below it.
    share : float
        Of the places at which the draft is right, whatever it says. Elsewhere it is by what it has
        read, as lookup is.

    Attributes
    ----------
    tokens : list of int
        One per position.
    kept : list of bool
        Whether the draft is right about a position.
    """

    def __init__(self, vocab_size: int, share: float = 0.0) -> None:
        draw = random.Random(0)
        tokens: list[int] = []
        while len(tokens) < LENGTH:
            tokens += (draw.randrange(vocab_size) for _ in range(NEW))
            if len(tokens) > REPEATED:
                begin = draw.randrange(len(tokens) - REPEATED)
                tokens += tokens[begin : begin + REPEATED]
        self.tokens = tokens[:LENGTH]
        draw = random.Random(1)
        self.kept = [draw.random() < share for _ in range(LENGTH)]

    def runs(self) -> list[int]:
        """Return how many places after every position are kept in a row."""
        found = [0] * LENGTH
        for at in reversed(range(LENGTH - 1)):
            found[at] = 1 + found[at + 1] if self.kept[at + 1] else 0
        return found

    def check(self, texts: Sequence[Text]) -> dict[str, Any]:
        """Compare texts with what they must be, wherever no draft decided.

        First tokens are the target's own.

        Raises
        ------
        WrongTexts
            If a token is another one.
        """
        for text in texts:
            begin = len(text.request.prompt)
            for at, token in enumerate(text.tokens[1:], begin + 1):
                if not self.kept[at] and token != self.tokens[at]:
                    raise WrongTexts(f"token {at} is {token}, {self.tokens[at]} was to be written")
        return {"checked": len(texts), "as_written": len(texts)}


class Writer:
    """An `Acceptor` of a target that writes a given text; it draws and compares like the library's.

    Parameters
    ----------
    text : Written
        The text, which all requests have: they differ in their lengths and first tokens.
    rows : int
        Most requests at once.
    device : torch.device
        Where steps run.

    Attributes
    ----------
    shallow : Tensor
        ``[B]`` int32, as of `Forced`.
    """

    def __init__(self, text: Written, rows: int, device: torch.device) -> None:
        self.tokens = torch.tensor(text.tokens, device=device)
        self.lens = torch.tensor(text.runs(), dtype=torch.int32, device=device) + 1
        self.shallow = torch.zeros(rows, dtype=torch.int32, device=device)

    def __call__(
        self,
        tree: DraftTree,
        logits: Tensor,
        seq_lens: Tensor,
        config: SpecConfig,
        sampling: SamplingBatch,
        out: AcceptResult,
    ) -> AcceptResult:
        """Write ``out``; the logits are changed so that the target takes the text's tokens."""
        best = self.tokens[(tree.positions + 1).clamp(0, LENGTH - 1)]  # [B, n]
        if config.num_steps:
            lens = self.lens.index_select(0, seq_lens.clamp(max=LENGTH - 1))
            force = launch if logits.is_cuda else twin
            force(best, tree, lens, self.shallow, 0, config.num_steps)
        logits.scatter_(2, best[..., None], CERTAIN)
        return accept(tree, logits, seq_lens, config, sampling, out)
