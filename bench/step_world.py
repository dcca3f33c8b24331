"""Requests in mid-decode at the real size: random weights, random keys and values, no prompts.

What a step costs does not depend on what the numbers are, but for the tree's depth (so the draft's
distribution is made as peaked as a trained one's) and for how much is accepted (so that is forced).
Of layers with states, these are random, too, and go on from step to step: lengths alone go back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bench.random_models import random_eagle3, random_mtp, random_target
from bench.step_forced import Forced
from specattn.cache.hybrid_pool import HybridPool
from specattn.config import SpecConfig
from specattn.cuda_graph.recorder import Recorder
from specattn.models import MtpHead
from specattn.models.fused.delta import DeltaBlock
from specattn.speculative.model import ModelSlot
from specattn.speculative.proposers.host import HostProposer, HostTree
from specattn.speculative.sampling.params import SamplingBatch, SamplingParams
from specattn.speculative.step.decoder import StepDecoder
from specattn.speculative.step.setup import StepSetup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PretrainedConfig

    from specattn.cache.kv_pool import KVPool
    from specattn.cache.memory import Memory
    from specattn.cache.slot_table import SlotTable
    from specattn.models import FusedTarget
    from specattn.models.eagle import DraftHead
    from specattn.models.fused.block import FusedModel
    from specattn.speculative.model import DraftModel, TargetModel
    from specattn.speculative.proposers.host import HostRequest

DRAFT_VOCAB = 32000
# logits of random weights have a spread of 1, which no tree of this size would go deep for
SHARPER = 32.0
# slots after the longest context: a step's, and a few more
ROOM = 80
# the distribution of the tokens that the requests propose first
FIRST, NEXT = 0.6, 0.3
# Qwen3.5-9B: of four layers three have states
HYBRID: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
    },
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Shape:
    """A model by its name, and the configurations that make it and its EAGLE-3 head.

    Without one for a head, an MTP layer of the model's own kind drafts.
    """

    name: str
    target: PretrainedConfig
    draft: PretrainedConfig | None
    draft_vocab: int = DRAFT_VOCAB


def shapes(longest: int, layers: int | None = None, states: str = "float32") -> dict[str, Shape]:
    """Return the models of 8B and 9B; ``layers`` cuts them short, to compile only.

    ``states`` is the dtype that a checkpoint with states names.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, LlamaConfig, Qwen3Config

    sizes: dict[str, Any] = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": longest,
    }
    llama = sizes | {"vocab_size": 128256, "intermediate_size": 14336, "rope_theta": 500000.0}
    qwen = sizes | {"vocab_size": 151936, "intermediate_size": 12288, "rope_theta": 1000000.0}
    found = {
        "Llama-3.1-8B": Shape(
            "Llama-3.1-8B",
            LlamaConfig(**llama, num_hidden_layers=layers or 32),
            LlamaConfig(**llama, num_hidden_layers=1),
        ),
        "Qwen3-8B": Shape(
            "Qwen3-8B",
            Qwen3Config(**qwen, num_hidden_layers=layers or 36),
            LlamaConfig(**qwen, num_hidden_layers=1),
        ),
    }
    if "qwen3_5_text" in CONFIG_MAPPING:  # not every release has it
        hybrid = HYBRID | {"max_position_embeddings": longest, "mamba_ssm_dtype": states}
        config = AutoConfig.for_model("qwen3_5_text", **hybrid, num_hidden_layers=layers or 32)
        found["Qwen3.5-9B"] = Shape("Qwen3.5-9B", config, None)
    return found


@dataclass(frozen=True)
class Setting:
    """What is speculated, and who drafts it.

    Parameters
    ----------
    topk, steps, nodes : int
        Branches, depth, and nodes with the root; (1, 0, 1) is plain decoding.
    draft : str
        ``eagle3`` for the world's own head, an MTP layer too, ``dflash`` for best-first trees over
        a block, or ``host`` for trees that are handed over, every node with two children.
    ranks : int
        Tokens of every place of a block.
    """

    topk: int
    steps: int
    nodes: int
    draft: str = "eagle3"
    ranks: int = 8

    @property
    def name(self) -> str:
        if not self.steps:
            return "plain"
        if self.draft == "host":
            return f"host {self.nodes}"
        if self.draft == "dflash":
            return f"DFlash {self.steps}-{self.nodes}"
        return f"{'chain' if self.topk == 1 else 'tree'} {self.topk}-{self.steps}-{self.nodes}"

    def config(self, longest: int, reqs: int) -> SpecConfig:
        shape = self.steps, self.topk, self.nodes, longest, reqs
        if self.draft == "dflash":
            return SpecConfig(*shape, tree="best_first", ranks=self.ranks)
        return SpecConfig(*shape)

    def options(self, count: int, lowest: int) -> dict[str, Any]:
        """Return what a step of ``count`` requests is told, of tokens below ``lowest``."""
        if self.draft != "host":
            return {}
        # node 0 and 1 follow the text, node i its node i // 2 - 1
        parents = [node // 2 - 1 for node in range(self.nodes - 1)]
        tokens = torch.randint(lowest, (count, self.nodes - 1)).tolist()
        return {"trees": [HostTree(some, parents) for some in tokens]}


PLAIN = Setting(1, 0, 1)
SETTINGS = (Setting(1, 3, 4), Setting(1, 5, 6), Setting(4, 5, 16), Setting(8, 7, 64))
MTP = (Setting(1, 3, 4), Setting(3, 3, 8))
HOST = (Setting(2, 7, 16, "host"), Setting(8, 7, 64, "host"))


class HostTrees(HostProposer):
    """A proposer whose trees come from elsewhere."""

    def draft(self, requests: Sequence[HostRequest], config: SpecConfig) -> Sequence[HostTree]:
        raise NotImplementedError("these trees are handed over")


class World:
    """A model, its head, and rows with slots for the longest contexts of their places.

    Parameters
    ----------
    shape : Shape
        What to make.
    rooms : sequence of int
        The longest context of the request at every place of a batch.
    device, dtype : torch.device, torch.dtype
        Where, and of what.
    backend : str
        Of the attention.
    room : int
        Slots of a request after its longest context.
    weights, draft_weights : str, optional
        How to quantise the layers of the model, and all that is the head's own.
    """

    def __init__(
        self,
        shape: Shape,
        rooms: Sequence[int],
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
        backend: str = "triton",
        room: int = ROOM,
        weights: str | None = None,
        draft_weights: str | None = None,
    ) -> None:
        self.device, self.rooms, self.backend = device, list(rooms), backend
        torch.manual_seed(0)
        target = random_target(shape.target, dtype=dtype, device=device, quantization=weights)
        draft, self.lowest = _head(shape, target, draft_weights)
        lens = [longest + room for longest in rooms]
        slots, self.longest = sum(lens) + 1, max(lens)
        features = target.with_features(draft.features)
        sizes = SpecConfig(max_context_len=self.longest, max_num_reqs=len(lens))
        setup = StepSetup.over(features, draft, sizes, num_slots=slots, backend=backend)
        self.table: SlotTable = setup.table
        self.rows = [self.table.allocate() for _ in lens]
        self.table.reserve(self.rows, lens)
        self._shuffle(slots)
        self.target: ModelSlot[TargetModel]
        self.draft: ModelSlot[DraftModel]
        self.target, self.draft = setup.slots
        for slot in setup.slots:
            for kept in slot.tensors().values():
                for data in kept:
                    data.normal_()
        # plain decoding returns no features
        self.plain: ModelSlot[TargetModel] = ModelSlot.of(target, self.target.pool, backend)
        self.model, self.head = target, draft
        self._recorder = Recorder()

    def _shuffle(self, slots: int) -> None:
        """Spread the tokens of all requests over the pool."""
        order = torch.zeros(slots, dtype=torch.int32, device=self.device)
        order[1:] = torch.randperm(slots - 1, device=self.device) + 1
        for row in self.table.req_to_token:
            row.copy_(order[row.long()])

    def share(self, common: int) -> None:
        """Let all requests begin with the same ``common`` tokens, in the first one's slots."""
        self.table.req_to_token[self.rows, :common] = self.table.req_to_token[self.rows[0], :common]

    def decoder(
        self,
        setting: Setting,
        buckets: Sequence[int],
        accept: Forced,
        *,
        record: bool = True,
    ) -> StepDecoder:
        """Capture a setting."""
        setup = StepSetup.over(
            *self.slots_of(setting),
            setting.config(self.longest, len(self.rows)),
            table=self.table,
            record=record,
            recorder=self._recorder,
            accept=accept,
        )
        return StepDecoder.of(setup, buckets=buckets)

    def slots_of(self, setting: Setting) -> tuple[ModelSlot[TargetModel], Any]:
        """Return the target and the draft of a setting."""
        if not setting.steps:
            return self.plain, None
        return (self.plain, HostTrees()) if setting.draft == "host" else (self.target, self.draft)

    def forced(self, length: int, kind: type[Forced] = Forced) -> Forced:
        """Return an acceptor of ``length`` tokens everywhere."""
        lens = torch.full((len(self.rows),), length, dtype=torch.int32, device=self.device)
        return kind(lens, self.lowest)

    def admit(self, decoder: StepDecoder, batch: int, context: int) -> list[int]:
        """Put ``batch`` requests of ``context`` tokens in mid-decode; returns their rows."""
        rows = self.rows[:batch]
        assert max(context, 1) <= min(self.rooms[:batch])
        self.put(decoder, rows, context)
        return rows

    def put(self, decoder: StepDecoder, rows: list[int], context: int) -> None:
        """Leave on rows what prompts of ``context`` tokens would, but for their KV."""
        count, topk = len(rows), decoder.config.topk
        vocab = min(self.head.vocab_size, self.lowest)
        state: dict[str, torch.Tensor] = {}
        if decoder.states.drafting:
            first = torch.rand(count, vocab, device=self.device).topk(topk, dim=1).indices
            probs = torch.tensor([FIRST * NEXT**i for i in range(topk)], device=self.device)
            hidden = decoder.states.drafting["hidden_states"]
            state = {
                "topk_probs": probs.expand(count, topk),
                "topk_tokens": first,
                "hidden_states": torch.randn(count, hidden.shape[1], device=self.device).to(hidden),
                "draft_probs": torch.empty(count, 0, device=self.device),
            }
        decoder.states.admit(
            torch.tensor(rows, device=self.device),
            torch.full((count,), context, dtype=torch.int32, device=self.device),
            torch.randint(1, vocab, (count,), device=self.device),
            state,
            SamplingBatch.of([SamplingParams()] * count, self.device),
        )

    def read_bytes(self, setting: Setting, batch: int, context: int) -> dict[str, int]:
        """Return the bytes a step cannot do without, by what they are.

        Every weight once per forward that reads it, and every layer's keys and values of the
        context once per forward. States and windows once before anything is accepted and once
        after that, and written; in plain decoding read once. What nodes leave for the commit is
        written, and read along the path.
        """
        tokens = batch * context
        found = {
            "target weights": matrix_bytes(self.model),
            "target KV": cached_bytes(self.target.pool, tokens),
        }
        if by_row := self.target.by_row().values():
            passes = 3 if setting.steps else 2
            found["states"] = passes * batch * sum(one[:, 0].nbytes for one in by_row)
            if setting.steps:
                moved = setting.nodes + setting.steps + 1
                found["nodes"] = self._nodes_bytes() * batch * moved
        if setting.steps and setting.draft != "host":
            assert self.head.fc is not None
            # the drafts after the first token, and the extend
            forwards, mixes = setting.steps, self._mixing(setting)
            found["draft weights"] = forwards * matrix_bytes(self.head)
            found["draft weights"] += mixes * self.head.fc.nbytes
            found["draft KV"] = forwards * cached_bytes(self.draft.pool, tokens)
        return found

    def operations(self, setting: Setting, batch: int) -> int:
        """Return the floating point operations of a step's matrix products, attention aside."""
        target, head = (matrix_numbers(model) for model in (self.model, self.head))
        if not setting.steps or setting.draft == "host":
            return 2 * batch * setting.nodes * target
        assert self.head.fc is not None
        # the extend asks for logits of one row only
        path, logits = setting.steps + 1, self.head.lm_head.weight.numel()
        fc, mixes = self.head.fc.weight.numel(), self._mixing(setting)
        drafted = setting.topk * ((setting.steps - 1) * head + (mixes - 1) * fc)
        extend = path * (head - logits + fc) + logits
        return 2 * batch * (setting.nodes * target + drafted + extend)

    def _mixing(self, setting: Setting) -> int:
        """Return how many forwards mix what the head reads: EAGLE-3's extend alone."""
        return setting.steps if isinstance(self.head, MtpHead) else 1

    def _nodes_bytes(self) -> int:
        """Return what a node leaves for the commit, in bytes."""
        one = self.target.nodes(1, 1)
        return 0 if one is None else one.size


def _head(shape: Shape, target: FusedTarget, weights: str | None) -> tuple[DraftHead, int]:
    """Make a draft, and return from where on there are only tokens that it never proposes."""
    if shape.draft is None:
        # a token of logit 0 is never among the best
        lowest = target.vocab_size - 1
        target.lm_head.weight[lowest].zero_()
        return random_mtp(target, quantization=weights, sharper=SHARPER), lowest
    head = random_eagle3(
        shape.draft, target, shape.draft_vocab, quantization=weights, sharper=SHARPER
    )
    return head, head.vocab_size


def attending(pool: Memory) -> KVPool:
    """Return the keys and values of a pool."""
    return pool.kv if isinstance(pool, HybridPool) else pool


def cached_bytes(pool: Memory, tokens: int) -> int:
    """Return the bytes of all layers' keys and values of so many tokens."""
    kv = attending(pool)
    return tokens * (kv.k[:, 0].nbytes + kv.v[:, 0].nbytes)


def matrix_bytes(model: FusedModel) -> int:
    """Return the bytes of the matrices that every forward reads."""
    return sum(matrix.nbytes for matrix in _matrices(model))


def matrix_numbers(model: FusedModel) -> int:
    """Return how many numbers these matrices have."""
    return sum(matrix.weight.numel() for matrix in _matrices(model))


def _matrices(model: FusedModel) -> list[Any]:
    found = [model.lm_head]
    for block in model.blocks:
        feed: Any = block.feed
        states = isinstance(block, DeltaBlock)
        found += [*block.mixed, block.out] if states else [block.qkv, block.o]
        found += [feed.gate_up, feed.down]
    return found
