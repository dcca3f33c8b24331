"""``--speculative-algorithm SPECATTN``, as SGLang's dispatch sees it.

To everything but its worker it is an EAGLE-3 algorithm, or EAGLE with heads that read the target's
last state alone, and with DFlash heads: the target gives features, the head's pool has the target's
slots, the radix cache is keyed by pairs of tokens, and slots are reserved before every step.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.spec_registry import CustomSpecAlgo
from transformers import PretrainedConfig

from specattn.config import SpecConfig
from specattn.errors import ModelError, UnsupportedError
from specattn.integrations.sglang import names
from specattn.models.checkpoint import says_dflash

if TYPE_CHECKING:
    from specattn.speculative.proposers.block import BlockShape

#: Steps, topk and nodes. Over a block topk is how many tokens of a place a tree chooses from.
Tree = tuple[int, int, int]
#: Options of SGLang that the algorithm does not serve, and the values that it serves.
SERVED: dict[str, tuple[Any, ...]] = {
    "enable_dp_attention": (False,),
    "enable_two_batch_overlap": (False,),
    "enable_multi_layer_eagle": (False,),
    "enable_pdmux": (False,),
    "enable_unified_memory": (False,),
    "enable_memory_saver": (False,),
    "enable_lora": (False, None),
    "enable_torch_compile": (False,),
    "enable_attn_tp_input_scattered": (False,),
    "enable_custom_logit_processor": (False,),
    "enable_return_hidden_states": (False,),
    "enable_deterministic_inference": (False,),
    "enable_linear_replayssm": (False,),
    "enable_int8_mamba_checkpoint": (False,),
    "disaggregation_mode": ("null",),
    "moe_a2a_backend": ("none", None),
    "pp_size": (1,),
    "attn_cp_size": (1,),
    "speculative_adaptive": (False,),
    "speculative_use_rejection_sampling": (False,),
    "speculative_accept_threshold_single": (1.0,),
    "speculative_accept_threshold_acc": (1.0,),
}
#: Classes of targets whose checkpoints have an MTP layer, though their settings do not say so.
MTP_TARGETS = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
#: Steps, topk and nodes where no option names them.
DEFAULT = (3, 1, 4)
#: Other trees of larger batches: ``24:3-1-4,64:2-1-3`` names steps, topk and nodes from 24 requests
#: on, and from 64.
TREES_VARIABLE = "SPECATTN_SGLANG_TREES"
#: How the head's own weights are quantised, one of `FORMATS`.
QUANTIZATION_VARIABLE = "SPECATTN_SGLANG_DRAFT_QUANTIZATION"
#: Requests at once where no option says how many, as for SGLang's own algorithms.
MAX_RUNNING = 48


def option_refusals(server_args: Any) -> list[str]:
    """Say which of SGLang's options the algorithm does not serve."""
    found = []
    for name, served in SERVED.items():
        value = getattr(server_args, name, served[0])
        if value not in served:
            found.append(f"{name}={value!r} is not served")
    if _head(server_args)[0] is None:
        found.append("speculative_draft_model_path must name an EAGLE, EAGLE-3, MTP or DFlash head")
    for check in (_check_trees, _check_quantization):
        try:
            check(server_args)
        except (ValueError, ModelError) as error:
            found.append(str(error))
    return found


def _check_trees(args: Any) -> None:
    block = _block(args)
    larger_trees(_tree(args, block), block)


def _check_quantization(args: Any) -> None:
    kind = draft_quantization()
    if kind is not None and _block(args) is not None:
        raise ValueError(
            f"{QUANTIZATION_VARIABLE}={kind} is of EAGLE-3 heads, and this is a DFlash head"
        )


def draft_quantization() -> str | None:
    """Return how the environment wants the head quantised, if at all.

    Raises
    ------
    ValueError
        If it names no known way.
    """
    from specattn.models.quantisation import check_format

    kind = os.environ.get(QUANTIZATION_VARIABLE) or None
    check_format(QUANTIZATION_VARIABLE, kind)
    return kind


def tree_config(tree: Tree, block: BlockShape | None = None, **sizes: Any) -> SpecConfig:
    """Return the config of steps of a tree.

    Parameters
    ----------
    tree : tuple of int
        Steps, topk and nodes.
    block : BlockShape, optional
        Of a head that drafts blocks; trees are best-first then.
    **sizes
        Further fields of the config.

    Raises
    ------
    ValueError
        If it is no tree, or deeper than the block.
    """
    steps, topk, nodes = tree
    if block is None:
        return SpecConfig(steps, topk, nodes, **sizes)
    most = block.size - block.first_draft
    if steps > most:
        raise ValueError(
            f"speculative_num_steps must be at most {most}, the tokens that a block of "
            f"{block.size} drafts, got {steps}"
        )
    if topk == 1:
        return SpecConfig(steps, 1, nodes, draft_len=block.size, **sizes)
    return SpecConfig(steps, 1, nodes, draft_len=block.size, tree="best_first", ranks=topk, **sizes)


def _tree(args: Any, block: BlockShape | None) -> Tree:
    """Return steps, topk and nodes; those of a chain follow.

    By default a block is drafted whole.

    Raises
    ------
    ValueError
        If one of them is missing, together they are no tree, or SGLang reserves less for it than
        the block takes.
    """
    steps, topk, nodes = given = (
        args.speculative_num_steps,
        args.speculative_eagle_topk,
        args.speculative_num_draft_tokens,
    )
    if block is not None and (steps, topk) == (None, None) and nodes in (None, block.size):
        steps, topk = block.size - block.first_draft, 1
    elif given == (None, None, None):
        return DEFAULT
    if topk == 1 and steps is not None:
        nodes = steps + 1
    if None in (steps, topk, nodes):
        raise ValueError(
            "speculative_num_steps, speculative_eagle_topk and speculative_num_draft_tokens "
            f"must be given together, got {', '.join(map(str, given))}"
        )
    tree_config((steps, topk, nodes), block)
    if block is not None and max(steps * topk, nodes) < block.size:
        raise ValueError(
            f"speculative_num_draft_tokens must be at least {block.size}, the slots that the "
            f"head's block takes, got {nodes} (speculative_dflash_block_size makes it shorter)"
        )
    return steps, topk, nodes


def larger_trees(tree: Tree, block: BlockShape | None = None) -> dict[int, Tree]:
    """Return the trees that the environment names for larger batches.

    Parameters
    ----------
    tree : tuple of int
        Steps, topk and nodes of the smallest batches. SGLang reserves slots for these.
    block : BlockShape, optional
        As in `tree_config`.

    Returns
    -------
    dict of int to tuple of int
        By the least number of requests, in ascending order.

    Raises
    ------
    ValueError
        If they are not written so, are no trees, or need more than ``tree``.
    """
    text = os.environ.get(TREES_VARIABLE, "")
    entries = [
        re.fullmatch(r"([2-9]|[1-9]\d+):(\d+)-(\d+)-(\d+)", one) for one in text.split(",") if text
    ]
    if not all(entries):
        raise ValueError(f"{TREES_VARIABLE} must be like '24:3-1-4,64:2-1-3', got {text!r}")
    found, most = {}, tree_config(tree, block)
    for entry in filter(None, entries):
        least, steps, topk, nodes = map(int, entry.groups())
        config = tree_config((steps, topk, nodes), block)
        if not steps or config.proposals > most.proposals or config.reserve_len > most.reserve_len:
            raise ValueError(
                f"{TREES_VARIABLE} must name trees that draft, and have no more branches and nodes "
                f"than {'-'.join(map(str, tree))}, got {entry[0]!r}"
            )
        found[least] = steps, topk, nodes
    return dict(sorted(found.items()))


def _head(server_args: Any) -> tuple[str | None, str | None]:
    """Return the folder and revision of the head.

    A target with MTP layers is its own.
    """
    args = server_args
    if args.speculative_draft_model_path is not None:
        return args.speculative_draft_model_path, args.speculative_draft_model_revision
    config = _config(args.model_path, args.revision)
    named = config.get("architectures") or [""]
    if config.get("num_nextn_predict_layers") or named[0] in MTP_TARGETS:
        return args.model_path, args.revision
    return None, None


def _block(server_args: Any) -> BlockShape | None:
    """Return the block of a DFlash head, None of other heads.

    Raises
    ------
    ModelError, ValueError
        If it is not served, or has no such block.
    """
    path, revision = _head(server_args)
    if path is None or not says_dflash(_config(path, revision)):
        return None
    # SGLang's other processes need no models
    from specattn.integrations.sglang import blocks

    return blocks.asked_block(blocks.checkpoint_of(path, revision), server_args)


def _config(path: str | None, revision: str | None) -> dict[str, Any]:
    """Return the settings in a model's folder."""
    found: dict[str, Any] = PretrainedConfig.get_config_dict(path, revision=revision)[0]
    return found


class SpecAttnAlgorithm(CustomSpecAlgo):
    """What SGLang asks of an algorithm that it dispatches on."""

    def is_eagle(self) -> bool:
        """Say that the draft has a pool of its own."""
        return True

    def is_eagle3(self) -> bool:
        """Say that the head reads features of several of the target's layers."""
        return True

    def has_draft_kv(self) -> bool:
        """Say that branches need no pages of their own."""
        return False

    # `CustomSpecAlgo` lacks these four of the interface

    def need_topk(self) -> bool:
        """Say that SGLang carries no proposals from step to step."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """Say that SGLang carries no states of the draft."""
        return False

    def get_platform_worker_cls(self) -> None:
        """Return no worker of a platform's own."""

    def create_future_map(
        self, device: Any, req_to_token_pool: Any, *args: Any, **options: Any
    ) -> RowMap:
        """Return what SGLang relays from step to step: nothing."""
        return RowMap(device, self, req_to_token_pool, *args, **options)

    def handle_server_args(self, server_args: Any) -> None:
        """Refuse what is not served; choose what is not said.

        Raises
        ------
        UnsupportedError
            In one line, naming all that is not served.
        """
        if found := names.step_problems() + option_refusals(server_args):
            raise UnsupportedError(f"SGLang algorithm {names.ALGORITHM!r}", found)
        args = server_args
        head = _head(args)
        args.speculative_draft_model_path, args.speculative_draft_model_revision = head
        kinds, block = _config(*head).get("architectures") or [""], _block(args)
        # SGLang's other processes see these options, and no more
        if block is not None:
            args.speculative_algorithm = names.DFLASH
        elif "eagle3" not in kinds[0].lower():
            args.speculative_algorithm = names.EAGLE
        steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens = _tree(args, block)
        if block is not None:
            args.speculative_dflash_block_size = block.size
        args.speculative_num_steps = steps
        if args.max_running_requests is None:
            args.max_running_requests = MAX_RUNNING
        args.enable_mixed_chunk = False


class SpecAttnEagle(SpecAttnAlgorithm):
    """The same where SGLang asks the target for its last state alone.

    EAGLE and MTP heads read that. For DFlash heads `BlockWorker` asks for others.
    """

    def is_eagle3(self) -> bool:
        """Say that the target gives no states of other layers."""
        return False


class RowMap(FutureMap):
    """A relay of nothing: steps find lengths and tokens by row.

    The lengths of SGLang's decode batches are those of their prompts; nothing reads them.
    """

    def resolve_seq_lens_cpu(self, batch: Any, *args: Any, **options: Any) -> None:
        """Say that the host knows no lengths."""
        if batch.spec_info is not None:
            batch.seq_lens_cpu = batch.seq_lens_sum = None

    def _resolve_spec_extras(self, batch: Any) -> None:
        """Gather nothing."""

    def publish(self, *args: Any, **options: Any) -> None:
        """Keep nothing."""

    def stash(self, *args: Any, **options: Any) -> None:
        """Keep nothing."""
