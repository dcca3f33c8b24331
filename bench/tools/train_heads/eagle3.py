"""The EAGLE-3 head (arXiv:2503.01840), computed densely over whole rows, and its losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from .layers import Heads, Mixed, Norm, draw, start
from .layouts import plain, speculators

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import LlamaConfig

    from .teacher import Teacher
    from .texts import Batch

KeysValues = tuple[Tensor, Tensor]


class ChainAttention(Heads):
    """Attention of many chains at once, one behind every position of a row."""

    def forward(self, x: Tensor, positions: Tensor, seen: list[KeysValues]) -> Tensor:
        """Attend ``x [B, T, width]``, the tokens of one draft step, a chain each.

        A token sees the keys of the first step up to its chain's base, and its own chain's keys of
        the steps since then. ``seen`` are those of the steps so far, and gets this one's.
        """
        q = self.queries(x, positions)
        seen.append(self.keys_values(x, positions))
        (keys, values), *chain = seen
        if not chain:
            heads = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
            return self.merged(heads)
        rows = x.shape[1]
        behind = torch.ones(rows, rows, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ keys.transpose(-1, -2)).float().masked_fill(behind, -torch.inf)
        tails = [(q * key).sum(-1, dtype=torch.float32) for key, _ in chain]
        weights = torch.cat([scores, torch.stack(tails, -1)], -1) * self.head_dim**-0.5
        weights = weights.softmax(-1)
        heads = weights[..., :rows].to(values.dtype) @ values
        for at, (_, value) in enumerate(chain):
            heads = heads + weights[..., rows + at, None].to(value.dtype) * value
        return self.merged(heads)


class MidLayer(nn.Module):
    """The one decoder layer; its residual stream is the feature, not the embedding."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            Norm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )
        self.self_attn = ChainAttention(config, 2 * config.hidden_size, normed=False)
        self.mlp = LlamaMLP(config)

    def forward(
        self, embed: Tensor, feature: Tensor, positions: Tensor, seen: list[KeysValues]
    ) -> Tensor:
        """Return the new feature ``[B, T, H]``; see `ChainAttention.forward`."""
        both = torch.cat([self.input_layernorm(embed), self.hidden_norm(feature)], -1)
        x = feature + self.self_attn(both, positions, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(nn.Module):
    """An EAGLE-3 head.

    At position p it reads token ``t[p + 1]`` and a feature of position p, and predicts
    ``t[p + 2]``. The feature is `fc` of the target's ``states``, or in later draft steps the head's
    own hidden state. It knows the target's tokens ``draft_ids``, in ascending order; training takes
    ``unroll`` draft steps.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self, config: LlamaConfig, states: tuple[int, ...], draft_ids: Tensor, *, unroll: int
    ) -> None:
        super().__init__()
        self.config, self.states = config, states
        # of the losses of draft steps
        self.weights = [0.9**step for step in range(unroll)]
        self.fc = Mixed(len(states) * config.hidden_size, config.hidden_size)
        self.midlayer = MidLayer(config)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, len(draft_ids), bias=False)
        self.register_buffer("d2t", draft_ids - torch.arange(len(draft_ids)))
        in_draft = torch.zeros(config.vocab_size, dtype=torch.bool)
        self.register_buffer("t2d", in_draft.index_fill(0, draft_ids, True))
        draw(self)

    @torch.no_grad()
    def start(self, teacher: Teacher, batch: Batch) -> None:
        """Begin near the target, whose projection has the rows that predict."""
        features, last, _ = teacher(batch.tokens)
        start(self, features, last)
        self.lm_head.weight.copy_(teacher.lm_head.weight[self.draft_ids])

    @property
    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary, ``[draft_vocab]`` int64."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states ``[..., H]`` to draft logits ``[..., draft_vocab]``."""
        return self.lm_head(self.norm(hidden))

    def unroll(self, tokens: Tensor, embed: nn.Module, features: Tensor) -> Iterator[Tensor]:
        """Yield the hidden states ``[B, T, H]`` of the chained draft steps.

        Row position p is the base of its own chain: step s reads the token after position p + s at
        rotary position p + s. So one dense call per step stands for a chain drafted after every
        position (the training-time test of the paper).

        ``tokens`` is ``[B, T]`` and ``features`` is ``[B, T, F]``.
        """
        rows, steps = tokens.shape[1], len(self.weights)
        positions = torch.arange(rows, device=tokens.device)[None]
        following = F.pad(tokens, (0, steps))
        hidden = self.fc(features)
        seen: list[KeysValues] = []
        for step in range(steps):
            read = embed(following[:, step + 1 : step + 1 + rows])
            hidden = self.midlayer(read, hidden, positions + step, seen)
            yield hidden

    def losses(self, batch: Batch, teacher: Teacher) -> tuple[Tensor, Tensor]:
        """Return cross entropy and agreement with the target's best token, by draft step.

        Both are means over the tokens of answers. The entropy is that of the target's distribution
        over the draft vocabulary, at places whose best token it has; the agreement counts all.
        """
        features, _, logits = teacher(batch.tokens)
        best, wanted = logits.argmax(-1).flatten(), logits.flatten(0, 1)[:, self.draft_ids]
        bases, left = chain_bases(batch)
        losses, agreements = [], []
        for step, hidden in enumerate(self.unroll(batch.tokens, teacher.embed, features)):
            # the place whose logits predict the token that this step does
            at = (bases + step + 1).clamp(max=batch.tokens.numel() - 1)
            counted = step < left
            log_q = self.logits(hidden.flatten(0, 1)[bases]).float().log_softmax(-1)
            entropy = -(wanted[at].float().softmax(-1) * log_q).sum(-1)
            losses.append(mean(entropy, counted & self.t2d[best[at]]))
            right = self.draft_ids[log_q.argmax(-1)] == best[at]
            agreements.append(mean(right, counted))
        return torch.stack(losses), torch.stack(agreements)

    def settings(self, layout: str, teacher: Teacher) -> dict[str, Any]:
        """Return ``config.json`` in the layout of SGLang or of speculators."""
        vocab = {"draft_vocab_size": len(self.d2t)}
        if layout == "speculators":
            found = speculators(self.config, "eagle3", teacher.name, len(self.weights))
            # it counts states that enter a layer
            states = {"eagle_aux_hidden_state_layer_ids": list(self.states)}
            return found | vocab | states | {"architectures": ["Eagle3DraftModel"]}
        # SGLang counts states that leave one
        leaving = [state - 1 for state in self.states]
        states = {"eagle_aux_hidden_state_layer_ids": leaving, "use_aux_hidden_state": True}
        found = plain(self.config, "LlamaForCausalLMEagle3", "llama")
        return found | vocab | {"eagle_config": states}


def chain_bases(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the places, flattened, after which chains are drafted, and how many of their steps.

    A step is counted if the token that it predicts belongs to the answer.
    """
    place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    left = (batch.lengths[:, None] - 2 - place).clamp(min=0)
    # the token after next is the answer's
    left *= place >= batch.prompt_lens[:, None] - 2
    bases = left.flatten().nonzero()[:, 0]
    return bases, left.flatten()[bases]


def mean(values: Tensor, counted: Tensor) -> Tensor:
    """Return the mean of the values that count; 0 of none."""
    return (values * counted).sum() / counted.sum().clamp(min=1)
