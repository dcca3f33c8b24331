"""Backends that are torch_native but for one thing each, wrong on purpose."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, ClassVar

import torch

from specattn.backends.base import BoundAttention, Capabilities
from specattn.backends.torch_native import TorchNativeBackend
from specattn.batch import Linked
from specattn.config import KVScales
from specattn.errors import UnsupportedError
from specattn.plan import AttnPlan, CsrPlan, ExtendPlan
from specattn.speculative.proposers.dflash import DFlashProposer
from specattn.speculative.proposers.host import HostProposer, HostTree
from specattn.speculative.proposers.lookup import LookupProposer
from specattn.speculative.proposers.proposer import BoundProposer, Proposer
from specattn.speculative.proposers.standalone import LMDraft, StandaloneProposer


class Bound(BoundAttention):
    """What torch_native bound, for a mutant to get wrong."""

    def __init__(self, backend: Mutant, plan: Any) -> None:
        self.backend, self.scales, self.sinks = backend, KVScales(), None
        self.given = self.plan = plan

    def fill(self) -> None:
        self.plan = self.backend.filled(self.given)

    def run(self, q, k_cache, v_cache, out, lse=None) -> None:
        backend = self.backend
        honest = TorchNativeBackend(backend.tweaked(backend.config), q.device)
        bound = honest.bind(backend.seen(self.plan)).for_layer(
            backend.rescaled(self.scales), prefetch=False
        )
        if self.sinks is not None and (sinks := backend.sunk(self.sinks)) is not None:
            bound = bound.with_sinks(sinks)
        backend.attend(bound.run, q, k_cache, v_cache, out, lse)

    def for_layer(self, scales: KVScales | None, *, prefetch: bool) -> Any:
        if scales is None:
            return self
        other = copy.copy(self)
        other.scales = scales
        return other

    def with_sinks(self, sinks: torch.Tensor) -> Any:
        other = copy.copy(self)
        other.sinks = sinks
        return other


class Mutant(TorchNativeBackend):
    """Honest until a subclass overrides a step."""

    # it may remember what it likes, unlike a backend, whose attributes are read-only
    __setattr__ = object.__setattr__

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__

    def bind(self, plan: Any) -> Any:
        return Bound(self, plan)

    def filled(self, plan: Any) -> Any:
        return plan

    def tweaked(self, config: Any) -> Any:
        return config

    def seen(self, plan: Any) -> Any:
        hooks = {AttnPlan: self.table, CsrPlan: self.lists}
        return hooks[type(plan)](plan) if type(plan) in hooks else plan

    def table(self, plan: AttnPlan) -> Any:
        return plan

    def lists(self, plan: CsrPlan) -> Any:
        return plan

    def rescaled(self, scales: KVScales) -> KVScales:
        return scales

    def sunk(self, sinks: torch.Tensor) -> Any:
        return sinks

    def attend(self, run, q, k_cache, v_cache, out, lse) -> None:
        run(q, k_cache, v_cache, out, lse)
        self.after(q, k_cache, v_cache, out, lse)

    def after(self, q, k_cache, v_cache, out, lse) -> None:
        pass


class IgnoresTheWindow(Mutant):
    def tweaked(self, config):
        return replace(config, window_left=-1)


class MeasuresTheWindowByRow(Mutant):
    """Siblings get different windows (sglang#39287)."""

    def seen(self, plan):
        if not isinstance(plan, AttnPlan) or plan.layout.tail != plan.layout.q_len:
            return plan
        index = torch.arange(plan.layout.q_len, device=plan.seq_lens.device)
        by_row = plan.seq_lens[:, None].long() + index
        return replace(plan, positions=by_row, tail_positions=by_row)


class RemembersThePrefixes(Mutant):
    """Of prompts, those from when it was bound."""

    def bind(self, plan):
        if isinstance(plan, ExtendPlan):
            plan = replace(plan, seq_lens=plan.seq_lens.clone())
        return super().bind(plan)


class IgnoresTheCap(Mutant):
    def tweaked(self, config):
        return replace(config, logit_cap=0.0)


class IgnoresTheScale(Mutant):
    def tweaked(self, config):
        return replace(config, sm_scale=config.head_dim**-0.5)


class LogOfBaseTwo(Mutant):
    def after(self, q, k_cache, v_cache, out, lse):
        if lse is not None:
            lse.div_(math.log(2))


class NeedsTheLse(Mutant):
    def after(self, q, k_cache, v_cache, out, lse):
        lse.clamp_(min=-math.inf)


class TouchesUnusedSlots(Mutant):
    """Masks the weight but reads the value: 0 times NaN."""

    def after(self, q, k_cache, v_cache, out, lse):
        out.add_(0 * v_cache.float().sum())


class ReadsEvictedKeys(Mutant):
    def seen(self, plan):
        self.listed = (
            plan.kv_indices[: int(plan.kv_indptr[-1])] if isinstance(plan, CsrPlan) else None
        )
        return plan

    def after(self, q, k_cache, v_cache, out, lse):
        if self.listed is not None:
            out.add_(0 * v_cache[self.listed].float().sum())


class ReadsThePaddingSlot(Mutant):
    """With a weight of 0, which does not help against NaN."""

    def seen(self, plan):
        self.padded = isinstance(plan, AttnPlan) and not plan.req_pool_indices[-1]
        return plan

    def after(self, q, k_cache, v_cache, out, lse):
        if self.padded:
            out.add_(0 * v_cache[0].float().sum())


class IgnoresLaterWords(Mutant):
    """Trees of more than 64 nodes."""

    known: ClassVar[int] = 1

    def table(self, plan):
        words = plan.tail_words.clone()
        words[..., self.known :] = 0
        return replace(plan, tail_words=words)


class IsCausal(Mutant):
    """Takes every tree for a chain."""

    def seen(self, plan):
        if not isinstance(plan, AttnPlan) or plan.layout.q_len > 63:
            return plan
        first, count = plan.layout.tail - plan.layout.q_len, plan.layout.q_len
        rows = torch.tensor([(1 << first + i + 1) - 1 for i in range(count)])
        words = plan.tail_words.clone()
        words[..., 0] = rows
        return replace(plan, tail_words=words)


class TakesSlotsInOrder(Mutant):
    """A request's KV as one run of slots from its first."""

    def seen(self, plan):
        if isinstance(plan, CsrPlan):
            return plan
        first, place = plan.req_to_token[:, :1], torch.arange(plan.req_to_token.shape[1])
        return replace(plan, req_to_token=(first + place).int() % self.slots)

    def bind(self, plan):
        # as many as the smallest pool of the kit
        self.slots = 40
        return super().bind(plan)


class DropsThePartialPage(Mutant):
    def table(self, plan):
        return replace(plan, seq_lens=plan.seq_lens // 16 * 16)


class RemembersTheLengths(Mutant):
    """The capture's lengths forever (sglang#26019)."""

    def bind(self, plan):
        if isinstance(plan, AttnPlan):
            plan = replace(plan, seq_lens=plan.seq_lens.clone())
        if isinstance(plan, CsrPlan):
            plan = replace(plan, kv_indptr=plan.kv_indptr.clone())
        return super().bind(plan)


class SharesByTheFirstSlot(Mutant):
    """Whoever begins in one slot reads the keys of the first of them."""

    def table(self, plan):
        slots, lens = plan.req_to_token[plan.req_pool_indices], plan.seq_lens
        first = (slots[:, :1] == slots[:, 0]).int().argmax(1)
        common = torch.minimum(lens, lens[first])[:, None]
        table = torch.where(torch.arange(slots.shape[1]) < common, slots[first], slots)
        return replace(plan, req_to_token=table, req_pool_indices=torch.arange(len(lens)))


class RemembersTheTree(Mutant):
    def bind(self, plan):
        if isinstance(plan, AttnPlan):
            plan = replace(plan, tail_words=plan.tail_words.clone())
        return super().bind(plan)


class SharesOnePlan(Mutant):
    """What is bound last serves all (flashinfer wrappers that share a workspace)."""

    latest: Any = None

    def bind(self, plan):
        self.latest = plan
        return super().bind(plan)

    def seen(self, plan):
        return self.latest


class InterleavesTheHeads(Mutant):
    """Query head h reads KV head h % Hkv."""

    def attend(self, run, q, k_cache, v_cache, out, lse):
        heads, kv_heads = q.shape[1], k_cache.shape[1]
        order = torch.arange(heads).view(-1, kv_heads).T.flatten()
        part, sums = out.clone(), None if lse is None else lse.clone()
        run(q[:, order], k_cache, v_cache, part, sums)
        out[:, order] = part
        if lse is not None:
            lse[:, order] = sums


class LeavesTheLastRow(Mutant):
    def attend(self, run, q, k_cache, v_cache, out, lse):
        whole = out.clone()
        run(q, k_cache, v_cache, whole, lse)
        out[:-1] = whole[:-1]


class ServesSixteenRequests(Mutant):
    def after(self, q, k_cache, v_cache, out, lse):
        out[self.rows :] = 0

    def seen(self, plan):
        self.rows = plan.layout.q_len * 16 if not isinstance(plan, ExtendPlan) else 10**6
        return plan


class AveragesBlindRows(Mutant):
    """A softmax over -inf everywhere, made finite."""

    def attend(self, run, q, k_cache, v_cache, out, lse):
        sums = torch.empty(q.shape[:2], device=q.device)
        run(q, k_cache, v_cache, out, sums)
        if self.hits(lse):
            out[self.averaged(sums == -math.inf)] = 1
        if lse is not None:
            lse.copy_(sums)

    def hits(self, lse) -> bool:
        return True

    def averaged(self, blind):
        return blind


class AveragesBlindRowsWithoutLse(AveragesBlindRows):
    """The kernel that writes no lse does not look at it."""

    def hits(self, lse):
        return lse is None


class KeepsWhatBlindRowsHeld(AveragesBlindRows):
    """In a workspace, where the run before has left it."""

    def bind(self, plan):
        self.runs = 0
        return super().bind(plan)

    def hits(self, lse):
        self.runs += 1
        return self.runs > 1


class AttendsToNothing(AveragesBlindRows):
    """Where no row of a batch sees a key."""

    def averaged(self, blind):
        return blind & blind.all()


class RoundsTheWeights(Mutant):
    def after(self, q, k_cache, v_cache, out, lse):
        if q.dtype == torch.float16:
            out.copy_(out.bfloat16())


class IgnoresTheValuesScale(Mutant):
    def rescaled(self, scales):
        return replace(scales, v=1.0)


class KeepsTheFirstScales(Mutant):
    """As a recording does that baked them in."""

    def bind(self, plan):
        self.first = None
        return super().bind(plan)

    def rescaled(self, scales):
        self.first = self.first or scales
        return self.first


class CachesTheFirstLayer(Mutant):
    def bind(self, plan):
        self.outs: list[Any] = []
        return super().bind(plan)

    def attend(self, run, q, k_cache, v_cache, out, lse):
        if not self.outs:
            run(q, k_cache, v_cache, out, lse)
            self.outs = [out.clone(), None if lse is None else lse.clone()]
        out.copy_(self.outs[0])
        if lse is not None:
            lse.copy_(self.outs[1])


class WritesToThePool(Mutant):
    def after(self, q, k_cache, v_cache, out, lse):
        k_cache[-1] = 0


class WritesToThePlan(Mutant):
    def seen(self, plan):
        if isinstance(plan, AttnPlan):
            plan.tail_words.bitwise_or_(1 << 62)
        return plan


class PlansOnTheHost(Mutant):
    """Without saying so."""

    def bind(self, plan):
        bound = super().bind(plan)

        def schedule(seq_lens_cpu):
            if seq_lens_cpu is None:
                raise ValueError("seq_lens_cpu is needed")

        bound.schedule = schedule
        return bound


class NeedsNoHostMirror(Mutant):
    capabilities: ClassVar[Capabilities] = Capabilities(host_plan=True)


class ServesMoreThanItSays(Mutant):
    capabilities: ClassVar[Capabilities] = Capabilities(window=False)


class TakesPagesOfAnySize(Mutant):
    capabilities: ClassVar[Capabilities] = Capabilities(page_size=16)


class ServesLessThanItSays(Mutant):
    def bind(self, plan):
        if isinstance(plan, CsrPlan):
            raise UnsupportedError("this backend", ["no lists"])
        return super().bind(plan)


class ReturnsLastResults(Mutant):
    """A new tensor holds what the layer before has computed."""

    def bind(self, plan):
        class Stale(Bound):
            last = torch.zeros(())

            def result(self, q, k_cache, v_cache, lse=None):
                out = super().result(q, k_cache, v_cache, lse)
                found, self.last = self.last.expand_as(out).contiguous(), out
                return found

        return Stale(self, plan)


class SkipsEmptyPrefixes(Mutant):
    """Though their rows see the tail (sglang#28250)."""

    def seen(self, plan):
        self.empty = isinstance(plan, AttnPlan) and bool((plan.seq_lens == 0).all())
        return plan

    def after(self, q, k_cache, v_cache, out, lse):
        if self.empty:
            out.zero_()


class ReadsSixtyFourColumns(Mutant):
    def attend(self, run, q, k_cache, v_cache, out, lse):
        run(q[..., :64], k_cache[..., :64], v_cache, out, lse)


class ForgetsBeyondTwoThousand(Mutant):
    def table(self, plan):
        return replace(plan, seq_lens=plan.seq_lens.clamp(max=2000))


class DependsOnTheBatch(Mutant):
    """In the last bits, though it says that it does not."""

    capabilities: ClassVar[Capabilities] = replace(
        TorchNativeBackend.capabilities, deterministic=True
    )

    def seen(self, plan):
        count = len(plan.kv_indptr) if isinstance(plan, CsrPlan) else len(plan.seq_lens)
        self.noise = min(count, 8) * 2.0**-23
        return plan

    def after(self, q, k_cache, v_cache, out, lse):
        out.mul_(1 + self.noise)


class ForgetsTheSinks(Mutant):
    def sunk(self, sinks):
        return None


class AddsTheSinksPerSplit(Mutant):
    """Once per 64 keys of the longest request, in place of once."""

    def seen(self, plan):
        lens = plan.kv_indptr.diff() if isinstance(plan, CsrPlan) else plan.seq_lens
        self.splits = max(1, -(-int(lens.max()) // 64)) if len(lens) else 1
        return plan

    def sunk(self, sinks):
        return sinks + math.log(self.splits)


class KeepsTheFirstSinks(Mutant):
    """As what is bound once for all layers does."""

    def bind(self, plan):
        self.first = None
        return super().bind(plan)

    def sunk(self, sinks):
        self.first = sinks if self.first is None else self.first
        return self.first


class LeavesTheSinksOutOfTheLse(Mutant):
    def after(self, q, k_cache, v_cache, out, lse):
        if lse is not None and self.drawn is not None:
            lse.copy_(torch.log(torch.exp(lse.double()) - torch.exp(self.drawn.double())))

    def seen(self, plan):
        self.drawn = None
        return plan

    def sunk(self, sinks):
        self.drawn = sinks
        return sinks


class ForgetsBeyondFiveThousand(Mutant):
    """A token short, and only there."""

    def table(self, plan):
        lens = plan.seq_lens
        return replace(plan, seq_lens=torch.where(lens > 5000, lens - 1, lens))


class ForgetsInLongLists(Mutant):
    """A token short, in index lists of more than 5,000."""

    def lists(self, plan):
        begins, lens = plan.kv_indptr[:-1], plan.kv_indptr.diff()
        kept = [
            plan.kv_indices[begin + (length > 5000) : begin + length]
            for begin, length in zip(begins.tolist(), lens.tolist(), strict=True)
        ]
        ends = torch.tensor([0, *(len(one) for one in kept)]).cumsum(0).int()
        return replace(plan, kv_indptr=ends, kv_indices=torch.cat(kept))


class ScalesByThePaddedHeadSize(Mutant):
    def tweaked(self, config):
        padded = 1 << (config.head_dim - 1).bit_length()
        return replace(config, sm_scale=config.sm_scale * (config.head_dim / padded) ** 0.5)


class TakesValuesAsWideAsKeys(Mutant):
    """Finds a value by the stride of keys."""

    def attend(self, run, q, k_cache, v_cache, out, lse):
        numbers = torch.zeros(k_cache.shape)
        numbers.flatten()[: v_cache.numel()] = v_cache.flatten().nan_to_num(0.5)
        run(q, k_cache, numbers.to(v_cache)[..., : v_cache.shape[2]], out, lse)


class CutsValuesToTheKeysWidth(Mutant):
    """One block is as wide as a key, for both."""

    def after(self, q, k_cache, v_cache, out, lse):
        out[..., k_cache.shape[2] :] = 0


class CutsValuesWithoutLse(CutsValuesToTheKeysWidth):
    def after(self, q, k_cache, v_cache, out, lse):
        if lse is None:
            super().after(q, k_cache, v_cache, out, lse)


class ServesGroupsOfEight(Mutant):
    """Query heads per KV head."""

    def after(self, q, k_cache, v_cache, out, lse):
        out.unflatten(1, (k_cache.shape[1], -1))[:, :, 8:] = 0


class IgnoresTheCapInWindows(Mutant):
    def tweaked(self, config):
        return replace(config, logit_cap=0.0 if config.window_left >= 0 else config.logit_cap)


class SkipsTilesBeforeTheWindow(Mutant):
    """And a key of the window's with them."""

    def tweaked(self, config):
        far = config.window_left > 64
        return replace(config, window_left=config.window_left - far)


class IgnoresWordsAfterTheSecond(IgnoresLaterWords):
    """Trees of more than 128 nodes."""

    known: ClassVar[int] = 2


class ReadsWordsWhenFilled(Mutant):
    """Ancestors of a draft step become known after its `fill`."""

    def filled(self, plan):
        if not isinstance(plan, AttnPlan):
            return plan
        return replace(plan, tail_words=plan.tail_words.clone())


class ReadsListsWhenFilled(Mutant):
    def filled(self, plan):
        if not isinstance(plan, CsrPlan):
            return plan
        return replace(plan, kv_indices=plan.kv_indices.clone())


class OwnSoftmax(Mutant):
    """A softmax of its own over `AttnPlan`, honest until a subclass overrides a step of it."""

    hidden: ClassVar[float] = -math.inf

    def seen(self, plan):
        self.plan = plan
        return plan

    def prefix(self, plan, b: int) -> int:
        return int(plan.seq_lens[b])

    def near(self, distance):
        return (distance >= 0) & (distance <= self.config.window_left)

    def top(self, logits):
        return logits.amax(-1, keepdim=True)

    def attend(self, run, q, k_cache, v_cache, out, lse):
        plan, config = self.plan, self.config
        if not isinstance(plan, AttnPlan) or k_cache.dtype != q.dtype or config.sinks:
            run(q, k_cache, v_cache, out, lse)
            return
        n, node, group = plan.layout.q_len, torch.arange(plan.layout.tail), q.shape[1]
        group //= k_cache.shape[1]
        for b in range(plan.batch):
            length, rows = self.prefix(plan, b), slice(b * n, b * n + n)
            bits = plan.tail_words[b][:, node // 64] >> node % 64 & 1
            seen = torch.cat([bits.new_ones(n, length), bits], 1) != 0
            if config.window_left >= 0:
                places = torch.cat([torch.arange(length), plan.tail_positions[b]])
                seen &= self.near(plan.positions[b][:, None] - places)
            prefix = plan.req_to_token[plan.req_pool_indices[b], :length]
            slots = torch.cat([prefix, plan.tail_slots[b]]).long()
            keys, values = (
                pool[slots].double().repeat_interleave(group, 1) for pool in (k_cache, v_cache)
            )
            logits = torch.einsum("qhd,khd->hqk", q[rows].double(), keys) * config.sm_scale
            if config.logit_cap:
                logits = config.logit_cap * torch.tanh(logits / config.logit_cap)
            seen = seen & ~logits.isnan()
            blind = ~seen.any(-1)
            logits = logits.masked_fill(~seen, self.hidden)
            weights = torch.exp(logits - self.top(logits).masked_fill(blind[..., None], 0))
            weights = weights.masked_fill(blind[..., None], 0)
            total = weights.sum(-1)
            found = torch.einsum("hqk,khd->qhd", weights, values.nan_to_num(0))
            out[rows] = (found / total.masked_fill(blind, 1).T[..., None]).to(out.dtype)
            if lse is not None:
                sums = total.log() + self.top(logits)[..., 0].masked_fill(blind, 0)
                lse[rows] = sums.T.float()


class MasksWithMinusTenThousand(OwnSoftmax):
    """And spares rows without keys, as libraries do that mask so."""

    hidden: ClassVar[float] = -1e4


class SubtractsNoMaximum(OwnSoftmax):
    def top(self, logits):
        return torch.zeros_like(logits[..., :1])


class LooksIntoTheFuture(OwnSoftmax):
    """A window that is as wide to the other side."""

    def near(self, distance):
        return distance.abs() <= self.config.window_left


class ReadsEverythingListed(OwnSoftmax):
    """Whole table rows, whatever the lengths; what it finds of NaN it leaves out."""

    def prefix(self, plan, b):
        return plan.req_to_token.shape[1]


class Changed:
    """A proposer whose bound ones, of every batch size, a subclass may `change`."""

    def bind(self, step):
        bound = super().bind(step)
        self.change(bound)
        return bound

    def change(self, bound) -> None:
        pass


class MutantProposer(Changed, StandaloneProposer):
    """An honest proposer of a whole model until a subclass overrides a duty."""

    @classmethod
    def draft(cls, model: Any) -> LMDraft:
        class Draft(LMDraft):
            def make(self, slot):
                return cls(slot(self))

        return Draft(model, model.vocab_size)


class CountsPositionsFromTheChunk(MutantProposer):
    def prompt(self, chunk):
        return super().prompt(replace(chunk, positions=chunk.positions - chunk.positions[0]))


class ForgetsTheBonusToken(MutantProposer):
    def prompt(self, chunk):
        return super().prompt(replace(chunk, bonus_tokens=torch.zeros_like(chunk.bonus_tokens)))


class GivesPromptsTheFirstOnesState(MutantProposer):
    """Of those that end in one chunk."""

    def prompt(self, chunk):
        return {name: kept[:1].expand_as(kept) for name, kept in super().prompt(chunk).items()}


class ForgetsTheBonusTokenOfCaptures(MutantProposer):
    def bind_prompt(self, chunk):
        bound = super().bind_prompt(chunk)
        read, pieces = bound.read, chunk.pieces

        def forgetful(features):
            pieces.bonus_tokens.zero_()
            return read(features)

        bound.read = forgetful
        return bound


class ReadsPaddingOfCaptures(MutantProposer):
    """Its keys go to the last slot that is anybody's."""

    def bind_prompt(self, chunk):
        bound = super().bind_prompt(chunk)
        read, slots = bound.read, chunk.tokens.slots

        def careless(features):
            torch.where(slots < 0, slots.max(), slots, out=slots)
            return read(features)

        bound.read = careless
        return bound


class ChoosesOnTheHost(MutantProposer):
    def change(self, bound):
        honest, buffers = bound.propose, bound.step.buffers

        def propose():
            assert int(buffers.seq_lens.max()) >= 0
            return honest()

        bound.propose = propose


class WritesMoreThanItSays(MutantProposer):
    def draft_len(self, config):
        return 2


class ReadsTheLastRow(MutantProposer):
    def change(self, bound):
        honest, step = bound.absorb, bound.step

        def absorb(accepted):
            step.buffers.last_rows.fill_(step.config.num_steps)
            return honest(accepted)

        bound.absorb = absorb


class KeepsStatesInAnAttribute(MutantProposer):
    """Of the requests that took part last, whoever takes part now."""

    def change(self, bound):
        absorb, propose, kept = bound.absorb, bound.propose, {}

        def absorb_and_keep(accepted):
            kept.update(absorb(accepted))
            return kept

        def propose_from_kept():
            for name, value in kept.items():
                bound.gathers[name].copy_(value)
            return propose()

        bound.absorb, bound.propose = absorb_and_keep, propose_from_kept


class KeepsStatesByRow(MutantProposer):
    """In a table of its own, where the next request with the row finds them."""

    def change(self, bound):
        absorb, propose, rows = bound.absorb, bound.propose, bound.step.buffers.req_pool_indices
        # of all batch sizes
        kept = vars(self).setdefault("kept", {})

        def absorb_and_keep(accepted):
            state = absorb(accepted)
            kept.update(zip(rows.tolist(), state["topk_tokens"].clone(), strict=True))
            return state

        def propose_from_kept():
            for at, row in enumerate(rows.tolist()):
                if row in kept:
                    bound.gathers["topk_tokens"][at] = kept[row]
            return propose()

        bound.absorb, bound.propose = absorb_and_keep, propose_from_kept


class GivesAllTheFirstOnesState(MutantProposer):
    def change(self, bound):
        honest = bound.absorb

        def absorb(accepted):
            return {name: new[:1].expand_as(new) for name, new in honest(accepted).items()}

        bound.absorb = absorb


class MutantBlock(Changed, DFlashProposer):
    """An honest proposer of blocks until a subclass overrides a duty."""

    @classmethod
    def draft(cls, model: Any) -> Any:
        return cls(model)


class LeavesTokensInTheBlock(MutantBlock):
    """What was drafted, where the next step expects masks."""

    def change(self, bound):
        honest = bound.propose

        def propose():
            found = honest()
            bound.block_ids[:, 1 : 1 + found.tokens.shape[1]] = found.tokens[..., 0]
            return found

        bound.propose = propose


class MutantLookup(Changed, LookupProposer):
    """An honest lookup until a subclass overrides a duty."""


class ReadsPastTheText(MutantLookup):
    def change(self, bound):
        honest, buffers = bound.propose, bound.step.buffers

        def propose():
            buffers.seq_lens.add_(1)
            found = honest()
            buffers.seq_lens.sub_(1)
            # what the target has said is known
            found.tokens[:, 0] = buffers.roots
            return found

        bound.propose = propose


class LosesTheLastToken(MutantLookup):
    """Of a path that is kept to its end."""

    def change(self, bound):
        honest, most = bound.absorb, bound.step.config.num_steps + 1

        def absorb(accepted):
            lens = accepted.accept_lens
            return honest(replace(accepted, accept_lens=lens - (lens == most).int()))

        bound.absorb = absorb


class BoundArithmetic(BoundProposer):
    """A chain whose tokens follow from root and position, honest until a subclass errs."""

    def __init__(self, proposer, step) -> None:
        super().__init__(proposer, step)
        nodes = torch.zeros(2, step.config.num_draft_tokens, dtype=torch.int64)
        self.tokens, self.parents = step.buffer("nodes", nodes).unbind(1)
        self.place = step.buffers.positions[:, 0]

    def followers(self):
        depth = torch.arange(self.step.config.num_steps, device=self.place.device)
        return (7 * self.step.buffers.roots[:, None] + self.place[:, None] + depth) % 50 + 1

    def link(self):
        count = self.step.config.num_steps + 1
        self.parents.fill_(-1)
        self.parents[:, :count] = torch.arange(-1, count - 1)

    def propose(self):
        self.link()
        self.tokens[:, 0] = self.step.buffers.roots
        self.tokens[:, 1 : 1 + self.step.config.num_steps] = self.followers()
        return Linked(self.tokens.contiguous(), self.parents.contiguous())


class ArithmeticProposer(Proposer):
    """Proposes by a class of `BoundArithmetic`, without a model."""

    def __init__(self, bound=BoundArithmetic) -> None:
        self.bound = bound

    def bind(self, step):
        return self.bound(self, step)


class GivesAllTheFirstOnesTokens(BoundArithmetic):
    def followers(self):
        return super().followers()[:1].expand(len(self.step), -1)


class CopiesAView(BoundArithmetic):
    """`flatten` gives a view of one request's positions, and a copy of several requests'."""

    def __init__(self, proposer, step) -> None:
        super().__init__(proposer, step)
        self.place = step.buffers.positions[:, :2].flatten()[::2]


class SharesFlatMemory(BoundArithmetic):
    """Parents of few requests lie where tokens of many do, and are written once."""

    def __init__(self, proposer, step) -> None:
        super().__init__(proposer, step)
        shape = 2, len(step), step.config.num_draft_tokens
        size = math.prod(shape)
        memory = step.shared("memory", lambda: self.place.new_zeros(size, dtype=torch.int64))
        self.tokens, self.parents = memory[:size].view(shape)
        super().link()

    def link(self):
        pass


class RepeatsTheNewest(HostProposer):
    """An honest proposer on the host."""

    def draft(self, requests, config):
        return [HostTree(one.tokens[-1:] * config.num_steps) for one in requests]


class ForgetsTheDepth(RepeatsTheNewest):
    def draft(self, requests, config):
        return [HostTree(one.tokens[-1:] * config.num_draft_tokens) for one in requests]


class WritesIntoTheText(RepeatsTheNewest):
    def draft(self, requests, config):
        trees = super().draft(requests, config)
        for one in requests:
            one.tokens.append(0)
        return trees


class ReversesTheTrees(RepeatsTheNewest):
    def draft(self, requests, config):
        return super().draft(requests, config)[::-1]


class FillsOneList(RepeatsTheNewest):
    """All trees are one list, which holds the last one's tokens."""

    def draft(self, requests, config):
        shared = []
        for one in requests:
            shared[:] = one.tokens[-1:] * config.num_steps
        return [HostTree(shared) for _ in requests]


class KeepsTexts(RepeatsTheNewest):
    """Copies of texts, by what a subclass takes for a request."""

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}

    def draft(self, requests, config):
        trees = []
        for at, one in enumerate(requests):
            text = self.texts.setdefault(self.key(at, one), [])
            text += one.tokens[len(text) :]
            trees.append(HostTree(text[-1:] * config.num_steps))
        return trees


class KeepsTextsByPlace(KeepsTexts):
    def key(self, at, one):
        return at


class KeepsTextsByAddress(KeepsTexts):
    """Which another request has when this one is gone."""

    def key(self, at, one):
        return id(one)


class ReadsATextOnce(RepeatsTheNewest):
    """A prompt; what follows it is never seen."""

    def draft(self, requests, config):
        return [
            HostTree(one.tokens[one.prompt_len - 1 : one.prompt_len] * config.num_steps)
            for one in requests
        ]
