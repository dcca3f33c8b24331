"""The sizes of the pair, and of the tiny pair that exercises the same script on a CPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PairSize:
    """Everything about the pair that is a number; the defaults are what ships.

    ``aux_layers`` are 0-based decoder layers of the target whose outputs the head reads.
    ``draft_steps`` is the length of the training-time unroll, step 0 included. What begins with
    ``block_`` is the DFlash head's: ``block_features`` are the layers whose outputs it reads, and
    ``block_anchors`` the blocks per row of a training step.
    """

    vocab: int = 3072
    draft_vocab: int = 2560
    hidden: int = 192
    layers: int = 12
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 320
    draft_intermediate: int = 768
    aux_layers: tuple[int, int, int] = (2, 6, 10)
    max_positions: int = 2048
    rope_theta: float = 10000.0
    rms_eps: float = 1e-6
    draft_steps: int = 7
    block_size: int = 16
    block_layers: int = 2
    block_intermediate: int = 768
    block_features: tuple[int, ...] = (2, 4, 6, 8, 10)
    block_anchors: int = 32
    # tokens per optimiser step of the target, and rows per step of a head
    batch_tokens: int = 32768
    seq_len: int = 1024
    draft_rows: int = 64
    # on-policy rows: prompt and continuation together, with room for the labels of the unroll
    row_len: int = 392
    prompt_lens: tuple[int, ...] = (64, 128, 192, 256)
    generate_rows: int = 4096
    eval_rows: int = 128
    eval_new_tokens: int = 128

    @property
    def shape(self) -> dict[str, int | float]:
        """What the configs of all three models have, by its name there."""
        return {
            "hidden_size": self.hidden, "num_attention_heads": self.q_heads,
            "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "vocab_size": self.vocab, "rms_norm_eps": self.rms_eps,
            "max_position_embeddings": self.max_positions,
        }  # fmt: skip


FULL = PairSize()
TINY = PairSize(
    draft_vocab=2048, hidden=64, layers=4, q_heads=2, kv_heads=1, intermediate=96,
    draft_intermediate=96, aux_layers=(0, 1, 2), block_size=8, block_intermediate=96,
    block_features=(0, 1, 2), block_anchors=4, max_positions=256, batch_tokens=1024, seq_len=128,
    draft_rows=4, row_len=72, prompt_lens=(16, 32), generate_rows=8, eval_rows=4,
    eval_new_tokens=24,
)  # fmt: skip
SIZES = {"full": FULL, "tiny": TINY}
