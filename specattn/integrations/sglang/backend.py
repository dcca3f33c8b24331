"""SGLang's attention interface over `specattn.attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from specattn.attention import Phase, RowLayout
from specattn.integrations.sglang import names
from specattn.integrations.sglang.layers import Layers
from specattn.masks import qlen_from_full

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from specattn.attention import BoundLayers, BoundMultiStep, Layer


class VerifyBuffers(list[Any]):
    """Buffers that SGLang fills after a draft: masks of trees alone."""


class LayerBackend(AttentionBackend):
    """Attention as SGLang calls it per layer, over plans that others fill.

    Parameters
    ----------
    runner : ModelRunner
        SGLang's.
    layer_of : callable
        Maps one of its layers to that of the plans.
    """

    #: nothing here reads a length on the host
    needs_cpu_seq_lens = False
    forward_metadata: BoundLayers | None = None

    def __init__(self, runner: Any, layer_of: Callable[[Any], Layer]) -> None:
        super().__init__()
        self._layer_of, self._latent = layer_of, runner.use_mla_backend
        self.max_context_len = runner.model_config.context_len
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool

    def forward_decode(  # noqa: PLR0913 - as its docstring says
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Store new keys and values if ``save_kv_cache``, and attend.

        Layers of latent attention may give queries and keys in two parts.
        """
        if asked := [name for name, value in options.items() if value is not None]:
            raise NotImplementedError(f"specattn does not serve {', '.join(asked)}")
        forward = self.forward_metadata
        assert forward is not None
        if not save_kv_cache:
            k = k_rope = v = None
        elif self._latent:
            v = None
        if q.dim() == 4:
            # SGLang 0.5.15's Gemma 3 gives tokens of one batch
            q = q[0]
        count, rows = forward.num_tokens, q.shape[0]
        out = None
        if rows > count:
            # a prompt padded to a captured number of tokens
            out = q.new_empty(rows, layer.tp_q_head_num * layer.v_head_dim)
            out[count:].zero_()
        found = forward.attend(
            self._layer_of(layer),
            _rows(count, q, q_rope),
            _rows(count, k, k_rope),
            _rows(count, v),
            out=None if out is None else out[:count],
        )
        return found if out is None else out

    forward_extend = forward_decode

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of a request that pads a captured batch."""
        return 1


class SpecAttnBackend(LayerBackend):
    """Attention in every mode but draft decode.

    Inside SGLang's graphs, decode, verify and draft extend copy in its tensors in one launch, and
    fill the plans of all layers in a second one. Prompts run eagerly.

    Parameters
    ----------
    runner : ModelRunner
        SGLang's.

    Raises
    ------
    UnsupportedError
        In one line, naming all that is not served.
    """

    def __init__(self, runner: Any) -> None:
        self.layers = Layers(runner)
        super().__init__(runner, self.layers.of)
        # a draft verifies nothing
        self._alloc_mask(0 if runner.is_draft_worker else names.num_draft_tokens(runner))

    def _alloc_mask(self, nodes: int) -> None:
        attention, self._nodes = self.layers.attention, nodes
        self._mask = torch.ones(
            attention.max_batch * nodes * nodes, dtype=torch.bool, device=attention.device
        )

    # --- verify masks -----------------------------------------------------------------------

    def get_verify_buffers_to_fill_after_draft(self) -> VerifyBuffers:
        """Return the mask that SGLang 0.5.15 writes after the draft: ``QLEN_ONLY``."""
        return VerifyBuffers([self._mask if len(self._mask) else None, None])

    @property
    def verify_mask(self) -> Any:
        """The same as newer releases ask for it."""
        from sglang.srt.layers.attention.verify_mask import VerifyMask
        from sglang.srt.speculative.eagle_utils import TreeMaskMode

        if not len(self._mask):
            return None
        most = self.layers.attention.max_batch
        return VerifyMask(buffer=self._mask, mode=TreeMaskMode.QLEN_ONLY, max_bs=most)

    def shared_read_ends(self, fm: Any) -> Any:
        """Say that layers read the request table until a forward ends."""
        from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

        return SharedReadEnds.POST_REPLAY

    def update_verify_buffers_to_fill_after_draft(
        self, spec_info: Any, cuda_graph_bs: int | None
    ) -> None:
        """Do nothing: the mask is read in the forward."""

    # --- metadata ---------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make room for captured batches that are larger than the request table."""
        if max_bs > self.layers.attention.max_batch:
            self.layers.resize(max_bs)
            self._alloc_mask(self._nodes)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Make what a capture needs; copy a mask that SGLang wrote elsewhere."""
        if forward_batch.forward_mode.is_idle():
            return
        layout = self._layout(forward_batch)
        if layout is None:
            return
        self.forward_metadata = self.layers.attention.forward(layout, forward_batch.batch_size)
        if layout.causal:
            return
        if layout.q_len > self._nodes:
            self._alloc_mask(layout.q_len)
        if in_capture:
            return
        mask = forward_batch.spec_info.custom_mask
        if mask is not None and mask.data_ptr() != self._mask.data_ptr():
            qlen_from_full(mask, forward_batch.seq_lens, layout.q_len, out=self._mask)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Copy the forward in and fill all plans, in two launches."""
        if forward_batch.forward_mode.is_idle():
            return
        layout = self._layout(forward_batch)
        if layout is None:
            self.forward_metadata = self._prompts(forward_batch)
            return
        batch, rows = forward_batch, forward_batch.batch_size
        tokens = rows * layout.q_len
        forward = self.forward_metadata = self.layers.attention.forward(layout, rows)
        forward.copy_in(
            batch.req_pool_indices[:rows],
            batch.seq_lens[:rows],
            batch.out_cache_loc[:tokens],
            batch.positions[:tokens],
            None if layout.causal else self._mask,
            # lengths count new tokens, but those of a tree
            counted=0 if layout.phase is Phase.VERIFY else layout.q_len,
        )

    def _layout(self, forward_batch: Any) -> RowLayout | None:
        """Return a forward's layout; prompts have none, whose requests differ in rows."""
        mode, page = forward_batch.forward_mode, self.layers.page_size
        if mode.is_decode():
            return RowLayout(1, 1, Phase.DECODE, True, page)
        if mode.is_target_verify():
            spec = forward_batch.spec_info
            n = spec.draft_token_num
            # masks of n-gram trees are trees whatever topk says; they have none
            chain = spec.custom_mask is None or getattr(spec, "topk", 0) == 1
            return RowLayout(n, n, Phase.VERIFY, chain, page)
        if mode.is_draft_extend_v2():
            n = forward_batch.input_ids.numel() // forward_batch.batch_size
            return RowLayout(n, n, Phase.PREFILL, True, page)
        return None

    def _prompts(self, forward_batch: Any) -> BoundLayers:
        # lists, but for tensors where SGLang 0.5.15 captures prompts
        new = list(map(int, forward_batch.extend_seq_lens_cpu))
        cached = map(int, forward_batch.extend_prefix_lens_cpu)
        return self.layers.attention.prompts(
            forward_batch.req_pool_indices,
            forward_batch.extend_prefix_lens,
            forward_batch.extend_seq_lens,
            forward_batch.out_cache_loc[: sum(new)],
            max_q_len=max(new),
            max_seq_len=max(new) + max(cached),
            page_size=self.layers.page_size,
        )


class SpecAttnDraft(AttentionBackend):
    """Draft decode of several steps, whose branches attend to their true ancestors.

    Parameters
    ----------
    runner : ModelRunner
        SGLang's, of the draft.
    topk, num_steps : int
        Branches, and steps; the last one's tokens are never run.

    Raises
    ------
    UnsupportedError
        As in `SpecAttnBackend`.
    """

    needs_cpu_seq_lens = False
    #: The draft whose steps run: SGLang chooses branches in a function that knows no backend.
    running: ClassVar[SpecAttnDraft | None] = None

    def __init__(self, runner: Any, topk: int, num_steps: int) -> None:
        super().__init__()
        self.topk, self.num_steps = topk, num_steps
        self.layers = Layers(runner)
        self.attn_backends = [LayerBackend(runner, self.layers.of) for _ in range(num_steps - 1)]
        self._forwards: BoundMultiStep | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make room for captured batches that are larger than the request table."""
        if max_bs > self.layers.attention.max_batch:
            self.layers.resize(max_bs)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Make what a capture needs."""
        self._made(forward_batch.batch_size)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Copy all steps in and fill their plans, in two launches."""
        batch, rows = forward_batch, forward_batch.batch_size
        forwards = self._forwards = self._made(rows)
        forwards.copy_in(
            batch.req_pool_indices[:rows],
            batch.seq_lens[:rows],
            batch.out_cache_loc[: rows * self.topk * self.num_steps],
        )
        for step, forward in zip(self.attn_backends, forwards.steps, strict=True):
            step.forward_metadata = forward
        SpecAttnDraft.running = self

    def _made(self, rows: int) -> BoundMultiStep:
        page = self.layers.page_size
        return self.layers.attention.draft(self.num_steps - 1, self.topk, rows, page_size=page)

    def grow(self, step: int, chosen: Tensor) -> None:
        """Write the ancestor words of a step's branches; one launch.

        Parameters
        ----------
        step : int
            From 0 on; the last, which is never run, is ignored.
        chosen : Tensor
            ``[B, topk]`` int64, SGLang's flat index of each branch among all candidates.
        """
        if self._forwards is not None and step < self.num_steps - 1:
            self._forwards.grow(step, chosen, flat=True)


def _rows(count: int, *parts: Tensor | None) -> Any:
    """View a layer's rows as ``[T, heads * size]``.

    Those in two parts become a pair.
    """
    given = [part.reshape(len(part), -1)[:count] for part in parts if part is not None]
    return tuple(given) if len(given) > 1 else next(iter(given), None)
