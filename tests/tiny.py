"""Small models in plain torch: enough attention to be wrong about, enough agreement to accept.

Both models add a shared random bigram table to what their attention says, so that a draft is
often, but not always, what the target wants.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor, nn

from specattn.config import AttnConfig
from specattn.speculative.model import DraftOutput, TargetOutput
from specattn.speculative.proposers.block import BlockShape, BlockView

VOCAB = 61
FREQ = 0.3


def bigram(vocab: int = VOCAB) -> Tensor:
    return torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(7))


def turns(positions: Tensor, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The cosine and sine of every position's angles, once for all layers of a forward."""
    freq = FREQ / (1.0 + torch.arange(half, device=positions.device, dtype=torch.float32))
    angle = positions[:, None, None].float() * freq
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)  # [T, 1, 2 * half]


def rotate(x: Tensor, turned: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding, so that a wrong position is a wrong answer."""
    cos, sin = turned
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class Block(nn.Module):
    def __init__(self, inputs: int, hidden: int, config: AttnConfig) -> None:
        super().__init__()
        c = config
        self.config = c
        sizes = (
            c.num_qo_heads * c.head_dim,
            c.num_kv_heads * c.head_dim,
            c.num_kv_heads * c.v_head_dim,
        )
        q, k, v = (nn.Linear(inputs, size, bias=False).weight for size in sizes)
        # one product for all three; queries and keys are twice what they would be
        self.qkv = nn.utils.skip_init(nn.Linear, inputs, sum(sizes), bias=False)
        self.qkv.weight = nn.Parameter(torch.cat([2 * q, 2 * k, v]).detach())
        self.o = nn.Linear(c.num_qo_heads * c.v_head_dim, hidden, bias=False)

    def project(self, x: Tensor, turned: tuple[Tensor, Tensor], skipped: int = 0) -> list[Tensor]:
        """Queries and keys, rotated, and values; without the first ``skipped`` heads."""
        c, t = self.config, len(x)
        x = nn.functional.layer_norm(x, x.shape[-1:])
        rotated = c.num_qo_heads + c.num_kv_heads - skipped
        sizes = [rotated * c.head_dim, c.num_kv_heads * c.v_head_dim]
        qk, v = self.qkv(x)[:, skipped * c.head_dim :].split(sizes, 1)
        qk = rotate(qk.view(t, rotated, c.head_dim), turned)
        queries = rotated - c.num_kv_heads
        return [
            qk[:, :queries].contiguous(),
            qk[:, queries:].contiguous(),
            v.reshape(t, c.num_kv_heads, c.v_head_dim),
        ]

    def forward(self, x: Tensor, turned: tuple[Tensor, Tensor], layer: int, attend) -> Tensor:
        return self.o(attend(layer, *self.project(x, turned)).flatten(1))


class TinyTarget(nn.Module):
    vocab_size = VOCAB
    max_context_len = 4096
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(
        self,
        *,
        layers=2,
        heads=(4, 2),
        head_dim=64,
        window=-1,
        cap=0.0,
        dtype=torch.float32,
        device="cpu",
        seed=0,
        sharp=2.0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        hidden = 64
        self.layers = tuple(
            AttnConfig(
                *heads, head_dim, dtype=dtype, logit_cap=cap, window_left=window if i % 2 else -1
            )
            for i in range(layers)
        )
        self.half = head_dim // 2
        self.embed = nn.Embedding(VOCAB, hidden)
        self.blocks = nn.ModuleList(Block(hidden, hidden, c) for c in self.layers)
        self.head = nn.Linear(hidden, VOCAB, bias=False)
        self.register_buffer("table", bigram() * sharp)
        self.to(device=device, dtype=dtype).requires_grad_(False)
        self.calls: list[int] = []

    @property
    def device(self) -> torch.device:
        return self.table.device

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    def forward(self, input_ids, positions, attend, rows=None) -> TargetOutput:
        self.calls.append(len(input_ids))
        x, turned = self.embed(input_ids), turns(positions, self.half, self.dtype)
        for layer, block in enumerate(self.blocks):
            x = x + block(x, turned, layer, attend)
        picked = slice(None) if rows is None else rows
        logits = 2 * self.head(x[picked]) + self.table[input_ids[picked]]
        return TargetOutput(logits, x)


def attentive(device: str | torch.device) -> TinyTarget:
    """A target whose texts soon differ if a token of the prompt does: bigrams decide less."""
    target = TinyTarget(device=device, sharp=1.0)
    for block in target.blocks:
        block.o.weight.mul_(8)
    return target


class TinyDraft(nn.Module):
    vocab_size = VOCAB
    hidden_size = 64
    feature_size = 64
    target_ids = None

    def __init__(
        self,
        *,
        heads=(2, 1),
        head_dim=64,
        dtype=torch.float32,
        device="cpu",
        seed=1,
        noise=0.5,
        sharp=2.0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = (AttnConfig(*heads, head_dim, dtype=dtype),)
        self.half = head_dim // 2
        self.embed = nn.Embedding(VOCAB, 64)
        self.block = Block(128, 64, self.layers[0])
        self.head = nn.Linear(64, VOCAB, bias=False)
        self.register_buffer("table", bigram() * sharp)
        self.noise = noise
        self.to(device=device, dtype=dtype).requires_grad_(False)

    def combine(self, hidden_states):
        return hidden_states * 0.5

    def forward(
        self, input_ids, hidden_states, positions, attend, rows=None, *, sources=None
    ) -> DraftOutput:
        if sources is not None:
            hidden_states = hidden_states[sources]
        x = torch.cat([self.embed(input_ids), hidden_states], -1)
        turned = turns(positions, self.half, x.dtype)
        x = hidden_states + self.block(x, turned, 0, attend)
        picked = slice(None) if rows is None else rows
        logits = self.noise * self.head(x[picked]) + self.table[input_ids[picked]]
        return DraftOutput(logits, x[picked])

    def to_target(self, token_ids):
        return token_ids


# a layer that sees the whole block, and a causal one
VIEWS = BlockView(False, True), BlockView(True, False)


class TinyBlockDraft(nn.Module):
    """Fills a block by the bigrams that follow its first token, and by attention."""

    vocab_size = VOCAB
    feature_size = 64
    target_ids = None

    def __init__(
        self,
        size=6,
        *,
        views=VIEWS,
        windows=(-1, 5),
        first_draft=1,
        dtype=torch.float32,
        device="cpu",
        seed=2,
        noise=0.5,
        sharp=2.0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.block = BlockShape(size, VOCAB - 1, first_draft, views)
        self.layers = tuple(AttnConfig(2, 1, 64, dtype=dtype, window_left=w) for w in windows)
        self.embed = nn.Embedding(VOCAB, 64)
        self.blocks = nn.ModuleList(Block(64, 64, c) for c in self.layers)
        self.head = nn.Linear(64, VOCAB, bias=False)
        table = bigram() * sharp
        tables = [table]
        for _ in range(size - 1):
            # what follows the most probable token of the place before
            tables.append(table[tables[-1].argmax(1)])
        self.register_buffer("tables", torch.stack(tables, 1))  # [V, n, V]
        self.noise = noise
        self.to(device=device, dtype=dtype).requires_grad_(False)

    def combine(self, hidden_states):
        return hidden_states * 0.5

    def write_context(self, states, positions, pool, slots):
        turned = turns(positions, 32, states.dtype)
        for layer, block in enumerate(self.blocks):
            _, k, v = block.project(states, turned, skipped=block.config.num_qo_heads)
            pool.store(layer, slots, k, v)

    def forward_block(self, input_ids, positions, attend, rows=None):
        x = self.embed(input_ids)
        turned = turns(positions, 32, x.dtype)
        for layer, block in enumerate(self.blocks):
            x = x + block(x, turned, layer, attend)
        size, first = self.block.size, self.block.first_draft
        places = torch.arange(len(x), device=x.device) if rows is None else rows
        anchors = input_ids.view(-1, size)[places // size, 0]
        tables = self.tables[anchors, (places % size - first).clamp(min=0)]
        return self.noise * self.head(x[places]) + tables

    def to_target(self, token_ids):
        return token_ids


class DenseAttend:
    """Causal attention over everything one request has been through, in float64."""

    def __init__(self, layers) -> None:
        self.layers = layers
        # keys and values of every layer, [T, heads, width]
        self.kv: list[list[Tensor]] = [[] for _ in layers]

    def __call__(self, layer, q, k, v):
        c, past, count = self.layers[layer], self.kv[layer], len(q)
        now = [k.double(), v.double()]
        if past:
            now = [torch.cat(pair) for pair in zip(past, now, strict=True)]
        self.kv[layer] = keys, values = now
        first = len(keys) - count
        # the query heads of a key head as more rows of it
        rows = q.double().transpose(0, 1).reshape(c.num_kv_heads, -1, c.head_dim)
        logits = (rows @ keys.permute(1, 2, 0) * c.sm_scale).view(c.num_qo_heads, count, -1)
        if c.logit_cap:
            logits = c.logit_cap * torch.tanh(logits / c.logit_cap)
        pos_q = torch.arange(first, first + count, device=q.device)[:, None]
        pos_k = torch.arange(len(keys), device=q.device)
        visible = pos_k <= pos_q
        if c.window_left >= 0:
            visible &= pos_q - pos_k <= c.window_left
        logits = logits.masked_fill(~visible, float("-inf"))
        weights = logits.softmax(-1).view(c.num_kv_heads, -1, len(keys))
        out = (weights @ values.transpose(0, 1)).view(c.num_qo_heads, count, -1)
        return out.transpose(0, 1).to(q.dtype)


def dense_greedy(target: TinyTarget, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding token by token, without any of the library.

    A text of the same weights is decoded once.
    """
    text = known(target, DenseAttend).setdefault(tuple(prompt), [])
    if len(text) < count:
        text[:] = decoded(target, prompt, count)
    return text[:count]


@dataclass(frozen=True)
class Weights:
    """What tells targets apart."""

    layers: tuple[AttnConfig, ...]
    device: torch.device
    digest: bytes

    @classmethod
    def of(cls, target: TinyTarget) -> Weights:
        versions = [tensor._version for tensor in (*target.parameters(), *target.buffers())]
        return cls(target.layers, target.device, digest(target, tuple(versions)))


# the last ones: no more targets are kept from being freed
@lru_cache(4)
def digest(target: TinyTarget, versions: tuple[int, ...]) -> bytes:
    found = hashlib.blake2b()
    for tensor in target.state_dict().values():
        found.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    return found.digest()


@cache
def _known(weights: Weights, of: object) -> dict[tuple[int, ...], list]:
    return {}


def known(target: TinyTarget, of: object) -> dict[tuple[int, ...], list]:
    """What is known of texts with a target's weights; nothing of a target that was changed."""
    plain = type(target) is TinyTarget and "forward" not in vars(target)
    return _known(Weights.of(target), of) if plain else {}


def decoded(target: TinyTarget, prompt: list[int], count: int) -> list[int]:
    attend = DenseAttend(target.layers)
    tokens, at, fed = [], 0, list(prompt)
    while len(tokens) < count:
        ids = torch.tensor(fed, device=target.device)
        positions = torch.arange(at, at + len(fed), device=target.device)
        logits = target(ids, positions, attend).logits
        at += len(fed)
        fed = [int(logits[-1].argmax())]
        tokens += fed
    return tokens
