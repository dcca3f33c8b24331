"""Forced acceptance, which SGLang's benches ask for by ``SGLANG_SIMULATE_ACC_LEN``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specattn.errors import UnsupportedError
from specattn.kernels.sampling import argmax_tokens, uniform

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.batch import AcceptResult, DraftTree
    from specattn.config import SpecConfig
    from specattn.speculative.sampling.params import SamplingBatch

#: The token that every request gains, as in SGLang.
TOKEN = 100
# a draw that no phase of a step makes
_DRAW = 7


class Simulated:
    """An `Acceptor` that keeps a given number of tokens, whatever they are.

    As in SGLang, nodes are kept in the order of their ids, and every token is `TOKEN`. A number
    between two is rounded up or down by chance, so that its mean is met; SGLang draws once for a
    batch, this for each request.

    Parameters
    ----------
    length : float
        Tokens that a step gains, the bonus token included.
    """

    def __init__(self, length: float) -> None:
        self.length = length

    def __call__(
        self,
        tree: DraftTree,
        logits: Tensor,
        seq_lens: Tensor,
        config: SpecConfig,
        sampling: SamplingBatch,
        out: AcceptResult,
    ) -> AcceptResult:
        """Write ``out``."""
        most = config.num_steps + 1
        length = max(1.0, min(float(most), self.length))
        # the target's choice is computed as a real step would, and dropped
        argmax_tokens(logits.flatten(0, 1))
        coins = uniform(sampling.seeds, seq_lens.long(), _DRAW)
        lens = int(length) + (coins < length - int(length)).int()
        at = torch.arange(most, dtype=torch.int32, device=lens.device)
        kept = at < lens[:, None]
        out.accept_index.copy_(torch.where(kept, at, -1))
        out.accept_tokens.copy_(torch.where(kept, TOKEN, 0))
        out.accept_lens.copy_(lens)
        out.bonus_tokens.fill_(TOKEN)
        return out


def asked() -> Simulated | None:
    """Return what SGLang's environment variables ask for, None for nothing.

    Raises
    ------
    UnsupportedError
        If they ask for another kind than rounding and fixed tokens.
    """
    from sglang.srt.environ import envs

    length = envs.SGLANG_SIMULATE_ACC_LEN.get()
    if length <= 0:
        return None
    wanted: dict[str, tuple[Any, str]] = {
        "SGLANG_SIMULATE_ACC_METHOD": (envs.SGLANG_SIMULATE_ACC_METHOD.get(), "match-expected"),
        "SGLANG_SIMULATE_ACC_TOKEN_MODE": (envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get(), "fixed"),
    }
    found = [
        f"{name} must be {served!r}, got {value!r}"
        for name, (value, served) in wanted.items()
        if value != served
    ]
    if found:
        raise UnsupportedError("SGLANG_SIMULATE_ACC_LEN", found)
    return Simulated(length)
