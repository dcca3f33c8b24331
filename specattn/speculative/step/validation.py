"""Checks of steps, always or when debugging."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specattn.batch import Candidates, Linked, Marginals
from specattn.checks import expect, instance, kind_of, whole_numbers
from specattn.config import SpecConfig
from specattn.errors import UnsupportedError
from specattn.speculative.model import ModelSlot, TargetModel, check_model
from specattn.speculative.states import RequestStates
from specattn.trees import validate_tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specattn.batch import DraftTree
    from specattn.speculative.proposers.proposer import BoundProposer, Proposal, Proposer
    from specattn.speculative.states import StateField
    from specattn.speculative.step.setup import StepSetup


def check_features(given: int, read: int) -> None:
    """Refuse target features of another width than the draft reads."""
    if given != read:
        raise ValueError(
            f"the target must give the {read} features that the draft reads, got {given}: "
            "use target.with_features(draft.features)"
        )


def check_logits(logits: Tensor, rows: int, vocab_size: int) -> None:
    """Refuse logits that are not a row per token, vocabulary wide."""
    if logits.shape != (rows, vocab_size):
        raise ValueError(
            f"the target's logits must be [{rows}, {vocab_size}], a row per token that was asked "
            f"for and its vocab_size, got {list(logits.shape)}"
        )


def check_setup(setup: StepSetup) -> None:
    """Refuse what steps cannot run with: backends, sizes, trees."""
    check_target(setup.target)
    instance("config", setup.config, SpecConfig, "a SpecConfig")
    options, config, proposer = setup.options, setup.config, setup.proposer
    if options.cudagraph == "full" and setup.plans_on_host:
        raise ValueError("a backend that plans on the host needs cudagraph='piecewise'")
    for slot in setup.slots[1:]:
        slot.backend.check_indices(options.indices)
        if slot.by_row():
            reason = "it has layers with states, whose steps nothing takes back"
            raise UnsupportedError(f"draft model {type(slot.model).__name__}", [reason])
    if (most := proposer.draft_len(config)) > config.reserve_len:
        raise ValueError(
            f"reserve_len must be at least {most}, what the draft writes past a context, got "
            f"{config.reserve_len}: use config.reserving({most})"
        )
    # whatever the nodes of a tree leave, so many must be served
    setup.target.nodes(0, config.num_draft_tokens)
    check_tables(setup)
    proposer.check(config)


def check_target(target: ModelSlot[TargetModel]) -> None:
    """Refuse what is no slot of a target, as a draft's."""
    instance("target", target, ModelSlot, "a ModelSlot (ModelSlot.of)")
    check_model("target", target.model, "the slot of a target model")


def check_target_model(target: object) -> None:
    """Refuse what is no target model: a path, a class, a draft."""
    check_model("target", target, "an HFTarget (from_pretrained, from_model) or another model")


def check_tables(setup: StepSetup) -> None:
    """Refuse tables, states and pools that lack rows or slots."""
    config, table, states = setup.config, setup.table, setup.states
    if not all(hasattr(table, name) for name in ("req_to_token", "reserved", "page_size")):
        raise ValueError(f"table must be a SlotTable or an ExternalTable, got {kind_of(table)}")
    instance("states", states, RequestStates, "RequestStates (RequestStates.alloc)")
    if config.page_size != table.page_size:
        raise ValueError(
            f"page_size must be the table's, {table.page_size}, got {config.page_size}"
        )
    if config.max_context_len < table.max_context_len:
        raise ValueError(
            f"max_context_len must be at least the table's, {table.max_context_len}, "
            f"got {config.max_context_len}"
        )
    rows = len(table.req_to_token)
    expect("states.seq_lens", states.seq_lens, (rows,), torch.int32, table.req_to_token.device)
    if config.num_steps:
        check_states(setup.proposer.state_fields(config), states.drafting)
    check_pools(setup.slots, table.req_to_token.device, table.num_pages * table.page_size)


def check_pools(slots: Sequence[ModelSlot[Any]], device: torch.device, num_slots: int = 0) -> None:
    """Refuse pools that lack the table's slots, or lie elsewhere."""
    for slot in slots:
        if slot.device != device:
            raise ValueError(f"pools must be on the table's {device}, got {slot.device}")
        if (found := slot.num_slots) < num_slots:
            raise ValueError(f"pools must have the table's {num_slots} slots, got {found}")


def check_states(fields: Mapping[str, StateField], drafting: Mapping[str, Tensor]) -> None:
    """Refuse states that lack what a proposer keeps."""
    for name, (width, dtype) in fields.items():
        found = drafting.get(name)
        if found is None:
            raise ValueError(
                f"states must hold {name}, got {list(drafting)}: allocate them with "
                "RequestStates.alloc(rows, proposer.state_fields(config), device)"
            )
        if found.shape[1] < width or found.dtype != dtype:
            raise ValueError(
                f"states must hold {name} [{len(found)}, {width}] {dtype}, "
                f"got {list(found.shape)} {found.dtype}"
            )


def check_proposal(proposal: Proposal, bound: BoundProposer) -> None:
    """Refuse what is no proposal for the step's batch and config."""
    config, batch, device = bound.step.config, len(bound.step), bound.step.device
    name, floats, ints = f"{type(bound).__name__}.propose", torch.float32, torch.int64
    groups = (config.num_steps - 1) * config.topk + 1
    wide, deep = (batch, groups * config.topk), (batch, config.num_steps, config.proposals)
    nodes = batch, config.num_draft_tokens
    kinds: dict[type, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {
        Candidates: {
            "scores": (wide, floats),
            "tokens": (wide, ints),
            "parents": ((batch, groups), ints),
        },
        Marginals: {"log_probs": (deep, floats), "tokens": (deep, ints)},
        Linked: {"tokens": (nodes, ints), "parents": (nodes, ints)},
    }
    fields = kinds.get(type(proposal))
    if fields is None:
        raise ValueError(
            f"what {name} returns must be Candidates, Marginals or Linked, got {kind_of(proposal)}"
        )
    if isinstance(proposal, Linked):
        if proposal.chosen is not None:
            fields["chosen"] = (batch,), torch.int32
        if proposal.fallback is not None:
            check_proposal(proposal.fallback, bound)
    elif config.draft_sampling:
        fields["draft_probs"] = (batch, config.num_steps, bound.proposer.vocab_size), floats
    for field, (shape, dtype) in fields.items():
        expect(f"{name}: {field}", getattr(proposal, field), shape, dtype, device)


def check_draft_tokens(draft: Proposer, vocab_size: int, device: torch.device) -> None:
    """Refuse drafts whose tokens the target has not; waits for the device."""
    ids = draft.to_target(torch.arange(draft.vocab_size, device=device))
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.numel():
        raise ValueError(
            f"the draft's to_target must map to the target's tokens 0..{vocab_size - 1}, "
            f"got {int(outside[0])}"
        )


def check_rows(rows: Sequence[int], known: frozenset[int], most: int) -> None:
    """Raise a ValueError unless rows are known and differ, but for 0."""
    if len(rows) > most:
        raise ValueError(f"at most {most} rows take part, padding included, got {len(rows)}")
    whole_numbers("every row", rows)
    found = set(rows)
    again = len(rows) - len(found)
    if (again and again != rows.count(0) - 1) or not found <= known:
        raise ValueError(
            f"rows must be distinct rows 1..{len(known) - 1}, or 0 for padding, got {list(rows)}"
        )


def taking_part(
    setup: StepSetup, rows: Sequence[int], seq_lens_cpu: Tensor | None, *, sampled: bool
) -> tuple[Tensor, Tensor] | None:
    """Check what a step will find on the device; waits for it.

    Returns the places ``[R]`` int64 and committed lengths ``[R]`` int32 of the requests that do not
    sit the step out, or None if all of them do.
    """
    config, table, states = setup.config, setup.table, setup.states
    where = torch.tensor(rows, dtype=torch.int64, device=table.req_to_token.device)
    lens = states.seq_lens[where]
    room = table.reserved[where].clamp(max=table.max_context_len)
    at = ((where != 0) & (lens + config.reserve_len <= room)).nonzero().flatten()
    if not len(at):
        return None
    mirror = lens.cpu() if seq_lens_cpu is None else seq_lens_cpu
    found, lens, num_slots = where[at], lens[at], setup.target.num_slots
    check_contents(found, lens, mirror[at.cpu()], config, table.req_to_token, num_slots)
    starts = lens + states.position_offsets[found].sum(1)
    limit = table.max_context_len - config.reserve_len
    if ((starts < 0) | (starts > limit)).any():
        raise ValueError(f"seq_lens + position_offsets must be 0..{limit}, got {starts.tolist()}")
    drawing = found[states.temperature[found] > 0].tolist()
    if drawing and not sampled:
        raise ValueError(f"sampled must be True: rows {drawing} have a temperature above 0")
    return at, lens


def check_contents(
    rows: Tensor,
    lens: Tensor,
    seq_lens_cpu: Tensor,
    config: SpecConfig,
    table: Tensor,
    num_slots: int,
) -> None:
    """Raise a ValueError that names what a batch's tensors hold wrongly.

    Waits for the device. Lengths agree with their host mirror and leave room for a step. Every
    position that a step reads or writes has a slot in the pools. Slots past the committed length
    belong to one request and lie in no other's prefix. Slots lie in pages of ``config.page_size``.
    """
    rows, lens = rows.cpu(), lens.cpu()
    if not torch.equal(lens, seq_lens_cpu):
        raise ValueError(
            f"seq_lens must be seq_lens_cpu {seq_lens_cpu.tolist()}, got {lens.tolist()}"
        )
    limit = table.shape[1] - config.reserve_len
    if ((lens < 0) | (lens > limit)).any():
        raise ValueError(f"seq_lens must be 0..{limit}, got {lens.tolist()}")
    slots: dict[int, list[int]] = {}
    uses: Counter[int] = Counter()
    prefixes: set[int] = set()
    for row, length in zip(rows.tolist(), lens.tolist(), strict=True):
        slots[row] = table[row, : length + config.reserve_len].tolist()
        for position, slot in enumerate(slots[row]):
            if not 0 < slot < num_slots:
                raise ValueError(
                    f"slot of row {row}, position {position} must be 1..{num_slots - 1}, got {slot}"
                )
        uses.update(slots[row][length:])
        prefixes.update(slots[row][:length])
    # requests may share a prefix, but nobody writes into one
    uses.update(prefixes)
    for row, own in slots.items():
        tail = own[-config.reserve_len :]
        if any(uses[slot] > 1 for slot in tail):
            raise ValueError(f"slots row {row} writes must be its own, got {tail}")
        _check_pages(row, own, config.page_size)


def _check_pages(row: int, slots: list[int], page: int) -> None:
    for position, slot in enumerate(slots):
        at = position % page
        first = slots[position - at]
        if first % page or slot != first + at:
            raise ValueError(
                f"slot of row {row}, position {position} must be number {at} of a page of {page} "
                f"(page_size), with {first} first, got {slot}"
            )


def check_tree(tree: DraftTree, seq_lens: Tensor, config: SpecConfig, vocab_size: int) -> None:
    """Refuse a tree by its defect; waits for the device.

    A `TreeError` is about links and words (`specattn.trees.validate_tree`), a ValueError about
    tokens outside the vocabulary and positions.
    """
    validate_tree(
        tree.retrieve_next_token, tree.retrieve_next_sibling, tree.words, config.num_steps
    )
    if ((tree.tokens < 0) | (tree.tokens >= vocab_size)).any():
        raise ValueError(f"tree.tokens must be 0..{vocab_size - 1}, got {tree.tokens.tolist()}")
    bits = torch.arange(64, device=tree.words.device)
    depth = (tree.words[..., None] >> bits & 1).sum((2, 3)) - 1  # [B, n]
    wanted = seq_lens[:, None] + depth
    if not torch.equal(wanted, tree.positions):
        raise ValueError(
            f"tree.positions must be seq_lens + depth {wanted.tolist()}, "
            f"got {tree.positions.tolist()}"
        )
