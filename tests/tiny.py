"""Small models in plain torch: enough attention to be wrong about, enough agreement to accept.

Both models add a shared random bigram table to what their attention says, so that a draft is
often, but not always, what the target wants.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specattn.config import AttnConfig
from specattn.speculative.block import BlockShape, BlockView
from specattn.speculative.model import DraftOutput, TargetOutput

VOCAB = 61
FREQ = 0.3


def bigram(vocab: int = VOCAB) -> Tensor:
    return torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(7))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding, so that a wrong position is a wrong answer."""
    half = x.shape[-1] // 2
    freq = FREQ / (1.0 + torch.arange(half, device=x.device, dtype=torch.float32))
    angle = positions[:, None, None].float() * freq
    a, b = x[..., :half], x[..., half:]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    def __init__(self, inputs: int, hidden: int, config: AttnConfig) -> None:
        super().__init__()
        c = config
        self.config = c
        self.q = nn.Linear(inputs, c.num_qo_heads * c.head_dim, bias=False)
        self.k = nn.Linear(inputs, c.num_kv_heads * c.head_dim, bias=False)
        self.v = nn.Linear(inputs, c.num_kv_heads * c.v_head_dim, bias=False)
        self.o = nn.Linear(c.num_qo_heads * c.v_head_dim, hidden, bias=False)

    def forward(self, x: Tensor, positions: Tensor, layer: int, attend) -> Tensor:
        c, t = self.config, len(x)
        x = nn.functional.layer_norm(x, x.shape[-1:])
        q = rotate(2 * self.q(x).view(t, c.num_qo_heads, c.head_dim), positions)
        k = rotate(2 * self.k(x).view(t, c.num_kv_heads, c.head_dim), positions)
        v = self.v(x).view(t, c.num_kv_heads, c.v_head_dim)
        return self.o(attend(layer, q, k, v).flatten(1))


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
        x = self.embed(input_ids)
        for layer, block in enumerate(self.blocks):
            x = x + block(x, positions, layer, attend)
        picked = slice(None) if rows is None else rows
        logits = 2 * self.head(x[picked]) + self.table[input_ids[picked]]
        return TargetOutput(logits, x)


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
        x = hidden_states + self.block(x, positions, 0, attend)
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
        laws = [table]
        for _ in range(size - 1):
            # what follows the most probable token of the place before
            laws.append(table[laws[-1].argmax(1)])
        self.register_buffer("laws", torch.stack(laws, 1))  # [V, n, V]
        self.noise = noise
        self.to(device=device, dtype=dtype).requires_grad_(False)

    def combine(self, hidden_states):
        return hidden_states * 0.5

    def write_context(self, states, positions, store):
        for layer, block in enumerate(self.blocks):
            x, c = nn.functional.layer_norm(states, states.shape[-1:]), block.config
            k = rotate(2 * block.k(x).view(len(x), c.num_kv_heads, c.head_dim), positions)
            store(layer, k, block.v(x).view(len(x), c.num_kv_heads, c.head_dim))

    def forward_block(self, input_ids, positions, attend, rows=None):
        x = self.embed(input_ids)
        for layer, block in enumerate(self.blocks):
            x = x + block(x, positions, layer, attend)
        size, first = self.block.size, self.block.first_draft
        places = torch.arange(len(x), device=x.device) if rows is None else rows
        anchors = input_ids.view(-1, size)[places // size, 0]
        laws = self.laws[anchors, (places % size - first).clamp(min=0)]
        return self.noise * self.head(x[places]) + laws

    def to_target(self, token_ids):
        return token_ids


class DenseAttend:
    """Causal attention over everything one request has been through, in float64."""

    def __init__(self, layers) -> None:
        self.layers = layers
        self.kv = [([], []) for _ in layers]
        self.positions: Tensor | None = None

    def __call__(self, layer, q, k, v):
        c = self.layers[layer]
        keys, values = self.kv[layer]
        first = sum(len(x) for x in keys)
        keys.append(k)
        values.append(v)
        group = c.num_qo_heads // c.num_kv_heads
        ks = torch.cat(keys).double().repeat_interleave(group, 1)
        vs = torch.cat(values).double().repeat_interleave(group, 1)
        logits = torch.einsum("qhd,khd->hqk", q.double(), ks) * c.sm_scale
        if c.logit_cap:
            logits = c.logit_cap * torch.tanh(logits / c.logit_cap)
        pos_q = torch.arange(first, first + len(q), device=q.device)[:, None]
        pos_k = torch.arange(len(ks), device=q.device)
        visible = pos_k <= pos_q
        if c.window_left >= 0:
            visible &= pos_q - pos_k <= c.window_left
        logits = logits.masked_fill(~visible, float("-inf"))
        return torch.einsum("hqk,khd->qhd", logits.softmax(-1), vs).to(q.dtype)


def dense_greedy(target: TinyTarget, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding token by token, without any of the library."""
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
