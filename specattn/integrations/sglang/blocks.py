"""DFlash heads inside SGLang: what their settings and SGLang's options say.

SGLang's modules hold their weights, and a pool of its own with the target's slots their keys and
values, so that its radix cache shares them with the target's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import CONFIG_NAME, cached_file

from specattn.errors import UnsupportedError
from specattn.integrations.sglang.names import ALGORITHM, block_size
from specattn.models.checkpoint import Checkpoint
from specattn.models.dflash import read_block, read_states
from specattn.models.head_settings import check_settings, read_logit_scale

if TYPE_CHECKING:
    from specattn.speculative.proposers.block import BlockShape

#: What has SGLang's models give states, by the layers that these leave; the first that one has.
CAPTURES = ("set_dflash_layers_to_capture", "set_eagle3_layers_to_capture")
#: More tokens than any embedding has.
_ANY_VOCABULARY = 2**31


def checkpoint_of(path: str, revision: str | None) -> Checkpoint:
    """Return a DFlash head's checkpoint, of which its settings are read.

    Raises
    ------
    ModelError
        For settings that are not served.
    """
    folder = Path(str(cached_file(path, CONFIG_NAME, revision=revision))).parent
    checkpoint = Checkpoint(path, folder)
    if checkpoint.by_speculators:
        raise checkpoint.wrong("has the layout of speculators; SGLang reads that of z-lab")
    check_settings(checkpoint)
    if checkpoint.settings.get("quantization_config"):
        raise checkpoint.wrong("is quantised; inside SGLang DFlash heads have plain weights")
    return checkpoint


def asked_block(checkpoint: Checkpoint, args: Any) -> BlockShape:
    """Return the block that SGLang's options ask for, the head's by default.

    As with SGLang's own algorithm for such heads, ``speculative_num_draft_tokens`` by itself is the
    size of the block.

    Raises
    ------
    ModelError
        If the head says nothing usable about blocks.
    ValueError
        If it is no block that the head drafts.
    """
    block, _ = _read(checkpoint, _ANY_VOCABULARY)
    size = args.speculative_dflash_block_size
    if (args.speculative_num_steps, args.speculative_eagle_topk, size) == (None, None, None):
        size = args.speculative_num_draft_tokens
    if size is None:
        return block
    if not block.first_draft < size <= block.size:
        raise ValueError(
            f"speculative_dflash_block_size must be {block.first_draft + 1}..{block.size}, "
            f"tokens of the head's block, got {size}"
        )
    return replace(block, size=size)


@dataclass(frozen=True)
class BlockHead:
    """What a DFlash head's settings say beside its weights.

    Parameters
    ----------
    block : BlockShape
        What it fills in one forward.
    features : tuple of int
        The target's layers whose inputs it reads.
    windows : tuple of int
        ``AttnConfig.window_left`` of its layers.
    logit_scale : float
        What its logits are multiplied by.
    """

    block: BlockShape
    features: tuple[int, ...]
    windows: tuple[int, ...]
    logit_scale: float

    @classmethod
    def of(cls, target: Any, draft: Any) -> BlockHead:
        """Read the head of a draft runner of SGLang's for a target.

        Raises
        ------
        ModelError
            If the settings do not fit the target.
        UnsupportedError
            For states of the target that SGLang does not give.
        """
        config, layers = draft.model_config, target.model_config.num_hidden_layers
        checkpoint = checkpoint_of(config.model_path, config.revision)
        block, windows = _read(checkpoint, target.model_config.vocab_size)
        features = read_states(checkpoint, layers)
        if features != tuple(sorted(set(features) - {layers})):
            reason = f"draft: it reads the target after layers {[at - 1 for at in features]}"
            wanted = f"SGLang gives states after layers 0..{layers - 2}, in ascending order"
            raise UnsupportedError(f"SGLang algorithm {ALGORITHM!r}", [f"{reason}; {wanted}"])
        block = replace(block, size=block_size(draft))
        return cls(block, features, windows, read_logit_scale(checkpoint))

    def capture(self, target: Any) -> None:
        """Have SGLang's target give the states that the head reads.

        Raises
        ------
        UnsupportedError
            If SGLang's model gives none.
        """
        model = target.model
        capture = next((getattr(model, name) for name in CAPTURES if hasattr(model, name)), None)
        if capture is None:
            reason = f"target: {type(model).__name__} has no {' or '.join(CAPTURES)}"
            raise UnsupportedError(f"SGLang algorithm {ALGORITHM!r}", [reason])
        capture([at - 1 for at in self.features])


def _read(checkpoint: Checkpoint, vocab_size: int) -> tuple[BlockShape, tuple[int, ...]]:
    return read_block(checkpoint, checkpoint.number("num_hidden_layers", 1), vocab_size)
