"""One speculative step: draft, verify, process, accept, score, commit, extend, advance.

`Step.run` is what an engine runs, what CUDA graphs record (whole, or in three parts), and what
runs line by line under a debugger on a CPU. Its only input are the table rows that take part. What
it reads besides, it finds on the device (`RequestStates`), and there it leaves what the next step
reads; the host gets a copy of the accepted tokens.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from specattn.backends.base import by_lengths_alone, fill_all
from specattn.batch import AcceptResult, DraftTree, ForwardMode, Linked, Marginals
from specattn.kernels.step import StepStart, begin_step, end_step, gather_path
from specattn.kernels.tree import best_first_tree, build_tree, link_tree
from specattn.plan import AttnInputs, AttnPlan
from specattn.speculative.proposers.draft import beams_of
from specattn.speculative.proposers.proposer import bind
from specattn.speculative.sampling.params import SamplingBatch
from specattn.speculative.sampling.processors import Processing
from specattn.speculative.states import check_kept
from specattn.speculative.step.buffers import StepBuffers, StepViews
from specattn.speculative.step.level import WHOLE, Level, StepPart
from specattn.speculative.step.validation import check_features, check_logits, check_proposal
from specattn.speculative.step.verify import over_target_vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from specattn.attention.bound import BoundLayers
    from specattn.backends.base import Fillable
    from specattn.kernels.gated_delta import Nodes
    from specattn.speculative.proposers.proposer import Proposal
    from specattn.speculative.sampling.processors import ProcessorStates
    from specattn.speculative.step.host_buffers import HostBuffers, LogprobBuffers
    from specattn.speculative.step.setup import StepSetup


class Step:
    """The phases of a step for a batch size, on static buffers.

    Parameters
    ----------
    setup : StepSetup
        Its models, config, table, states and options.
    host : HostBuffers
        Where the step finds its rows.
    packed : Tensor
        ``[B, N + 2]`` int64, what `advance` writes: the number of tokens gained, then those tokens
        and zeros. A row that did not take part (padding, or a request without slots for a step)
        gains 0.
    arena : dict of str to object
        The memory of steps of all batch sizes: the first, which is the largest, allocates it.

    Attributes
    ----------
    bound : BoundProposer
        The proposer for B requests.
    tree : DraftTree
        The nodes that the target verifies, over the buffers.
    processing : Processing or None
        What is done for requests with logits processors; None where none has any.
    """

    processing: Processing | None = None

    def __init__(
        self, setup: StepSetup, host: HostBuffers, packed: Tensor, arena: dict[str, Any]
    ) -> None:
        self.setup, self.host, self.packed, self.arena = setup, host, packed, arena
        self.target, self.proposer, self.config = setup.target, setup.proposer, setup.config
        self.table, self.states = setup.table, setup.states
        if "buffers" not in arena:
            arena["buffers"] = StepBuffers.alloc(len(packed), setup.widths, setup.device)
        self.buffers: StepBuffers = arena["buffers"].bind(len(packed))
        views = self.config, self.table, self.states, self.buffers, setup.options.indices, arena
        self.bound = bind(self.proposer, StepViews(*views))
        # whether what it proposes was looked at
        self._checked = False
        self.tree = self._tree()
        mode = ForwardMode.TARGET_VERIFY if self.config.num_steps else ForwardMode.DECODE
        self.verify_plan = self._plan(mode, self.tree.positions, self.tree.words)
        batch, count = self.tree.tokens.shape
        if "nodes" not in arena:
            arena["nodes"] = self.target.nodes(batch, count)
        nodes: Nodes | None = arena["nodes"]
        self._nodes = None if nodes is None else nodes.bind(batch)
        self.verify_attention = self.target.backend.bind(self.verify_plan, nodes=self._nodes)

    def with_processing(
        self, processors: ProcessorStates, logprobs: LogprobBuffers, bitmask: Tensor | None
    ) -> Step:
        """Return the step over the same buffers, for requests with processors."""
        step, rows = copy(self), self.buffers.req_pool_indices
        step.processing = Processing(processors, rows, logprobs, self.host.entry, bitmask)
        return step

    def _tree(self) -> DraftTree:
        buffers, drafts = self.buffers, self.config.num_steps > 0
        return DraftTree(
            # plain decoding verifies the bonus token alone
            buffers.tokens if drafts else buffers.roots[:, None],
            buffers.tree_positions if drafts else buffers.positions[:, :1],
            buffers.words,
            buffers.next_token,
            buffers.next_sibling,
            buffers.tree_probs,
        )

    def _plan(self, mode: ForwardMode, positions: Tensor, words: Tensor) -> AttnPlan:
        buffers, slots = self.buffers, self.buffers.window[:, : positions.shape[1]]
        inputs = AttnInputs(buffers.req_pool_indices, buffers.seq_lens, positions, slots, words)
        return AttnPlan.over(self.config.layout(mode), self.table.req_to_token, inputs)

    def run(self, part: StepPart = WHOLE, other: Step | None = None) -> None:
        """Run a step, or one part of it: no sync, capturable.

        The tree and what is kept of it are static buffers, so that a later part finds them. The
        ``other`` half of the requests runs before this one advances, so that neither does if
        anything fails.
        """
        tree, accepted = self.tree, self.buffers.accepted
        if part.has(ForwardMode.DRAFT_DECODE):
            self.begin()
            tree = self.draft()
        if part.has(ForwardMode.TARGET_VERIFY):
            logits, features = self.verify(tree)
            processed = self.process(tree, logits)
            accepted = self.accept(tree, processed, sampled=part.level > Level.GREEDY)
            self.score(accepted, logits, processed)
            self.commit(accepted, features)
        if part.has(ForwardMode.DRAFT_EXTEND):
            state = self.extend(accepted)
            if other is not None:
                other.run(part)
            self.advance(accepted, state)
        elif other is not None:
            other.run(part)

    def begin(self) -> None:
        """Gather the requests' states and derive every phase's metadata from their lengths."""
        self._gather()
        self.bound.begin()
        fill_all([*self.attention(ForwardMode.DRAFT_DECODE), *self._before_the_tree()])

    def draft(self) -> DraftTree:
        """Run the draft forwards and build the tree."""
        return self.build_tree(self.propose()) if self.config.num_steps else self.tree

    def propose(self) -> Proposal:
        """Run the draft forwards; returns every token that the draft looked at."""
        proposal = self.bound.propose()
        if not self._checked:
            check_proposal(proposal, self.bound)
            self._checked = True
        return proposal

    def build_tree(self, proposal: Proposal) -> DraftTree:
        """Make the tree of what was proposed.

        Of candidates it is the dynamic tree of EAGLE-2 (arXiv:2406.16858): they are ranked by the
        probability of their path, ties going to the lower flat index and NaN ranking last; a kept
        node's ancestors are kept too. Children are linked in ascending node id. Of marginals it is
        the best-first tree, which is a chain for one token per depth, or beams over them.
        """
        config, tree = self.config, self.tree
        beams = config.tree == "beam" and config.topk > 1
        if isinstance(proposal, Marginals) and beams:
            proposal = beams_of(proposal, config)
        roots = self.buffers.roots, self.buffers.seq_lens
        if isinstance(proposal, Linked):
            if proposal.fallback is not None:
                self.build_tree(proposal.fallback)
            link_tree(proposal, self.buffers.seq_lens, out=tree)
            return tree
        if isinstance(proposal, Marginals):
            best_first_tree(proposal, *roots, out=tree)
        else:
            build_tree(proposal, *roots, topk=config.topk, out=tree)
        if config.draft_sampling:
            tree.draft_probs.copy_(proposal.draft_probs)
        return tree

    def verify(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """Run the target over all nodes at once.

        Parameters
        ----------
        tree : DraftTree
            The nodes, of this step's batch size and tree width.

        Returns
        -------
        logits : Tensor
            ``[B, n, V]``, the target's logits after every node.
        features : Tensor
            ``[B, n, F]``, the hidden states that the draft reads; F is 0 without a draft.

        Raises
        ------
        ValueError
            If the target returns logits of another shape.
        """
        # what reads the tree waits for it
        fill_all(by_lengths_alone([self.verify_attention])[1])
        model, (batch, nodes) = self.target.model, tree.tokens.shape
        positions = self.buffers.rotary(tree.positions)
        out = model.forward(tree.tokens.flatten(), positions.flatten(), self.verify_attention, None)
        check_logits(out.logits, batch * nodes, model.vocab_size)
        features = out.hidden_states
        if features is None:
            features = out.logits.new_empty(batch * nodes, 0)
        return out.logits.unflatten(0, (batch, nodes)), features.unflatten(0, (batch, nodes))

    def process(self, tree: DraftTree, logits: Tensor) -> Tensor:
        """Return the logits that requests draw from, by each node's history.

        Parameters
        ----------
        tree : DraftTree
            The nodes that were verified.
        logits : Tensor
            ``[B, n, V]``, the target's, from `verify`.

        Returns
        -------
        Tensor
            ``[B, n, V]``: in float32 and of its own where requests may have processors
            (`process_logits`), else ``logits``.
        """
        return logits if self.processing is None else self.processing.process(tree, logits)

    def accept(self, tree: DraftTree, logits: Tensor, *, sampled: bool = False) -> AcceptResult:
        """Decide how much of the tree is kept.

        Parameters
        ----------
        tree : DraftTree
            The nodes that were verified.
        logits : Tensor
            ``[B, n, V]``, from `process`.
        sampled : bool
            Whether requests may draw; without, all are taken to be greedy, and only
            ``draft_sampling`` has the target's distributions computed.

        Returns
        -------
        AcceptResult
            What the acceptor returns: by default, over the step's buffers.
        """
        if self.config.draft_sampling and self.config.num_steps:
            probs = over_target_vocabulary(
                self.proposer, tree.draft_probs, self.target.model.vocab_size
            )
            tree = replace(tree, draft_probs=probs)
        buffers, sampling = self.buffers, self._sampling(sampled=sampled)
        result = self.setup.options.accept(
            tree, logits, buffers.seq_lens, self.config, sampling, buffers.accepted
        )
        # a graph's memory would hold them until the step ends
        return replace(result, probs=None) if self.processing is None else result

    def _sampling(self, *, sampled: bool) -> SamplingBatch:
        """Return how the requests draw; greedily, unless ``sampled``."""
        buffers, processing = self.buffers, self.processing
        min_p = None if processing is None else processing.min_p()
        return SamplingBatch(
            not sampled, buffers.temperature, buffers.top_k, buffers.top_p, buffers.seeds, min_p
        )

    def score(self, accepted: AcceptResult, logits: Tensor, processed: Tensor) -> None:
        """Write the log-probabilities of accepted tokens for the host.

        Parameters
        ----------
        accepted : AcceptResult
            What is kept, from `accept`.
        logits, processed : Tensor
            ``[B, n, V]``, from `verify` and `process`.
        """
        if self.processing is not None:
            sampling = partial(self._sampling, sampled=True)
            self.processing.score(accepted, logits, processed, sampling)

    def commit(self, accepted: AcceptResult, features: Tensor) -> None:
        """Move the kept path's KV and features to the front.

        Where nothing proposes, one token was verified, and nobody reads features. What the target
        keeps by row goes on in `advance`: it cannot go back, and what lies between may fail.

        Parameters
        ----------
        accepted : AcceptResult
            The nodes to keep.
        features : Tensor
            ``[B, n, F]``, from `verify`.

        Raises
        ------
        ValueError
            If the target gives features of another width than the draft reads.
        """
        if self.target.shares_prefixes:
            self.target.commit(self.verify_plan, accepted)
        if not self.bound.reads_path:
            return
        buffers = self.buffers
        # what nobody reads may be of any width
        if width := buffers.features.shape[-1]:
            check_features(features.shape[-1], width)
        gather_path(
            features[..., :width],
            accepted,
            buffers.seq_lens,
            features_out=buffers.features,
            last_rows_out=buffers.last_rows,
            after_out=buffers.after,
        )

    def extend(self, accepted: AcceptResult) -> Mapping[str, Tensor]:
        """Tell the proposer what is kept; return where it goes on.

        A draft model runs over the accepted path.

        Parameters
        ----------
        accepted : AcceptResult
            What is kept.

        Returns
        -------
        mapping of str to Tensor
            ``[B, w]``: new rows of `RequestStates.drafting`.
        """
        fill_all(by_lengths_alone(self.bound.absorbing)[1])
        state = self.bound.absorb(accepted)
        check_kept(f"what {type(self.bound).__name__}.absorb returns", state, self.states.drafting)
        return state

    def advance(self, accepted: AcceptResult, state: Mapping[str, Tensor]) -> None:
        """Advance the requests: write their states and what the host reads.

        Parameters
        ----------
        accepted : AcceptResult
            The tokens that they gained.
        state : mapping of str to Tensor
            Where proposing goes on, from `extend`.
        """
        buffers, states = self.buffers, self.states
        if not self.target.shares_prefixes:
            self.target.commit(self.verify_plan, accepted, self._nodes)
        end_step(
            buffers.req_pool_indices,
            buffers.seq_lens,
            accepted,
            seq_lens_table=states.seq_lens,
            bonus_table=states.bonus_tokens,
            copies=[(new, states.drafting[name]) for name, new in state.items()],
            packed_out=self.packed,
        )
        if self.processing is not None:
            self.processing.note(accepted)

    def pad(self) -> None:
        """Turn all requests into padding, whichever part runs.

        A part captured late would else write to slots of the last step, whose they are by now.
        """
        self.host.rows.zero_()
        self._gather()
        fill_all(self._before_the_tree())

    def attention(self, mode: ForwardMode | None) -> tuple[BoundLayers, ...]:
        """Return the attention of a part, or of the whole step."""
        drafts, extends = self.bound.proposing, self.bound.absorbing
        return {
            None: (*drafts, self.verify_attention, *extends),
            ForwardMode.DRAFT_DECODE: drafts,
            ForwardMode.TARGET_VERIFY: (self.verify_attention,),
            ForwardMode.DRAFT_EXTEND: extends,
        }[mode]

    def schedule(self, mode: ForwardMode | None, seq_lens_cpu: Tensor | None) -> None:
        """Plan the attention of a part on the host.

        Parameters
        ----------
        mode : ForwardMode or None
            The part; None for the whole step.
        seq_lens_cpu : Tensor or None
            ``[B]`` int32, committed lengths, 0 for padding.
        """
        read = seq_lens_cpu
        if seq_lens_cpu is not None:
            read = seq_lens_cpu + self.proposer.read_ahead * (seq_lens_cpu > 0)
        for attention in self.attention(mode):
            own = attention is self.verify_attention
            attention.schedule(seq_lens_cpu if own else read)

    def _before_the_tree(self) -> list[Fillable]:
        # the rest waits for what its part brings: the tree, or a plan made on the host
        attends = (self.verify_attention, *self.attention(ForwardMode.DRAFT_EXTEND))
        return by_lengths_alone(attends)[0]

    def _gather(self) -> None:
        buffers, states = self.buffers, self.states
        names = ("temperature", "top_k", "top_p", "seeds", "position_offsets")
        copies = [(states.bonus_tokens, buffers.roots)]
        copies += [(getattr(states, name), getattr(buffers, name)) for name in names]
        kept, positions = states.tensors(), self.bound.positions
        copies += [(kept[name], out) for name, out in self.bound.gathers.items()]
        if positions is None:
            positions = buffers.positions.new_empty(len(buffers.positions), 0, 1)
        begin_step(
            self.host.rows,
            self.host.entry,
            states.seq_lens,
            self.table.reserved,
            self.table.req_to_token,
            reserve_len=self.config.reserve_len,
            out=StepStart(
                buffers.req_pool_indices,
                buffers.seq_lens,
                buffers.window,
                buffers.positions,
                positions,
                self.bound.seq_lens,
            ),
            copies=copies,
            read_ahead=self.proposer.read_ahead,
        )
