"""Llama- and Qwen3-like decoders with everything between the matrix products fused.

The arithmetic is transformers'; only sums, norms and rotations are in float32 where transformers
rounds in between, so that in float16 and bfloat16 the two differ by roundings.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from specattn.kernels.fused import add_rms_norm, embed_rms_norm
from specattn.kernels.fused.stream import ready
from specattn.models.fused_block import Block, RotaryTable, packed_layers, product, random_linear
from specattn.models.hf import FeatureSpec, HFTarget, tokenizer_of
from specattn.speculative.model import TargetOutput

if TYPE_CHECKING:
    from transformers import LlamaConfig, Qwen3Config

    from specattn.config import AttnConfig
    from specattn.speculative.model import Attend


@dataclass(frozen=True, eq=False)
class FusedTarget:
    """A target of few launches; use it wherever an `HFTarget` goes.

    Build one with `from_target`, or with `random` for measurements.

    Parameters
    ----------
    layers : tuple of AttnConfig
        One per layer.
    blocks : tuple of Block
        The decoder layers.
    embed_tokens : nn.Embedding
        ``[V, H]``.
    lm_head : nn.Linear
        ``[V, H]``, without bias.
    norm : Tensor
        ``[H]``, weight of the final norm.
    eps : float
        Of every norm.
    max_context_len : int
        Tokens up to which positions mean what they did in training.
    eos_token_ids : frozenset of int
        Tokens that end a text.
    name : str
        Folder or Hub id, for the tokenizer.
    features : FeatureSpec
        What `forward` returns as hidden states.
    """

    layers: tuple[AttnConfig, ...]
    blocks: tuple[Block, ...]
    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    norm: Tensor
    eps: float
    max_context_len: int
    eos_token_ids: frozenset[int]
    name: str = ""
    features: FeatureSpec = field(default_factory=FeatureSpec)

    @classmethod
    def from_target(cls, target: HFTarget) -> Self:
        """Fuse a loaded model; both share one copy of the weights.

        Query, key and value weights are packed into one matrix, those of gate and up into
        another; the model's own become views of these.

        Raises
        ------
        ModelError
            If the model is not one of those this path computes.
        """
        blocks = tuple(packed_layers(target))
        ready(target.device)
        return cls(
            target.layers,
            blocks,
            target.embed_tokens,
            target.lm_head,
            target.module.model.norm.weight,
            target.config.rms_norm_eps,
            target.max_context_len,
            target.eos_token_ids,
            target.name,
            target.features,
        )

    @classmethod
    def random(
        cls,
        config: LlamaConfig | Qwen3Config,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        seed: int = 0,
    ) -> Self:
        """Make a model of this shape with random weights, made on ``device``.

        Parameters
        ----------
        config : LlamaConfig or Qwen3Config
            The shape; ``max_position_embeddings`` is the longest context.
        dtype : torch.dtype
            Of weights and hidden states.
        device : torch.device or str
            Where to make them.
        seed : int
            Of the weights; products keep the variance of what they multiply.
        """
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        device = torch.device(device)
        ready(device)
        generator = torch.Generator(device).manual_seed(seed)
        length = int(config.max_position_embeddings)
        rotary = RotaryTable(LlamaRotaryEmbedding(config).to(device), length)
        blocks = tuple(
            Block.random(config, rotary, dtype, generator) for _ in range(config.num_hidden_layers)
        )
        size, vocab = config.hidden_size, config.vocab_size
        embed = nn.Embedding(
            vocab, size, _weight=random_linear(vocab, size, dtype, generator) * size**0.5
        )
        head = nn.Linear(size, vocab, bias=False, device="meta")
        head.weight = nn.Parameter(
            embed.weight
            if config.tie_word_embeddings
            else random_linear(vocab, size, dtype, generator),
        )
        eos = config.eos_token_id
        return cls(
            (blocks[0].geometry,) * len(blocks),
            blocks,
            embed.requires_grad_(False),
            head.requires_grad_(False),
            torch.ones(size, dtype=dtype, device=device),
            config.rms_norm_eps,
            length,
            frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos),
        )

    def with_features(self, features: FeatureSpec) -> Self:
        """Return a target over the same weights that returns ``features`` as hidden states.

        Raises
        ------
        ValueError
            If the model has no such hidden state.
        """
        features.check(len(self.layers))
        return replace(self, features=features)

    def for_context(self, max_context_len: int) -> Self:
        """Return a target over the same weights with angles of ``max_context_len`` positions.

        Later positions count as the last one. Before, the table is of all positions of the model,
        and computed with the first forward.
        """
        old = self.blocks[0].rotary
        rotary = old.of_length(max_context_len)
        if rotary is old:
            return self
        return replace(self, blocks=tuple(replace(block, rotary=rotary) for block in self.blocks))

    @property
    def hidden_size(self) -> int:
        """Width of one hidden state."""
        return self.embed_tokens.embedding_dim

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return int(self.lm_head.weight.shape[0])

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights and of the hidden states."""
        return self.norm.dtype

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer next to the model, loaded on first use.

        Raises
        ------
        ModelError
            If there is none.
        """
        return tokenizer_of(self.name)

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> TargetOutput:
        """Run the model over flattened tokens; see `TargetModel.forward`."""
        eps, blocks = self.eps, self.blocks
        states, views = self._states(len(input_ids))
        x, stream = embed_rms_norm(
            input_ids, self.embed_tokens.weight, blocks[0].input_norm, eps, embedded=views.get(0)
        )
        for layer, block in enumerate(blocks[:-1]):
            x, stream = block.attend(x, stream, layer, positions, attend)
            x, stream = add_rms_norm(
                block.feed(x),
                stream,
                blocks[layer + 1].input_norm,
                eps,
                residual_out=views.get(layer + 1),
            )
        last = len(blocks) - 1
        x, stream = blocks[last].attend(x, stream, last, positions, attend)
        # the final norm is a feature, of all tokens, or done for the wanted rows only
        whole = last + 1 in views
        x, _ = add_rms_norm(
            blocks[last].feed(x),
            stream,
            self.norm,
            eps,
            rows=None if whole else rows,
            out=views.get(last + 1),
        )
        if whole and rows is not None:
            x = x[rows]
        wanted = self.features.hidden_states
        if len(views) < len(wanted):
            states = torch.cat([views[index] for index in wanted], dim=1)
        return TargetOutput(product(x, self.lm_head.weight), states)

    def _states(self, count: int) -> tuple[Tensor | None, dict[int, Tensor]]:
        """Make room for the features ``[T, F]``, and give each hidden state's place in it."""
        wanted = tuple(dict.fromkeys(self.features.hidden_states))
        if not wanted:
            return None, {}
        size = self.hidden_size
        states = self.norm.new_empty(count, len(wanted) * size)
        return states, dict(zip(wanted, states.split(size, dim=1), strict=True))
