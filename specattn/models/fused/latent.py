"""Latent attention (MLA), absorbed: heads share one row of keys per token.

The page docs/mla.md has the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from specattn.kernels.fused import add_partials, add_rms_norm, rotate
from specattn.models.fused.block import Block, add_norm_for

if TYPE_CHECKING:
    from torch import Tensor

    from specattn.models.fused.projection import Projection
    from specattn.speculative.model import Attend


@dataclass(frozen=True, eq=False, kw_only=True)
class LatentBlock(Block):
    """A layer of latent attention, over rows ``[rank + rope]``.

    Its ``qkv`` is what reads the layer's input, ``[Q + rank + rope, H]``: queries, compressed to Q
    numbers or as they are, the latent vector, and the part of the keys that is rotated. Its
    geometry is latent.

    Parameters
    ----------
    queries : Projection or None
        ``[Hq (nope + rope), Q]``, of compressed queries.
    query_norm : Tensor or None
        ``[Q]``, the weight of the norm of compressed queries.
    latent_norm : Tensor
        ``[rank]``, the weight of the norm of the latent vector.
    latent_eps : float
        Of these two norms.
    keys, values : Tensor
        ``[Hq, nope, rank]`` and ``[Hq, v, rank]``: what makes each head's keys and values of the
        latent vector. The other parts are those of `Block`.
    """

    queries: Projection | None = None
    query_norm: Tensor | None = None
    latent_norm: Tensor
    latent_eps: float
    keys: Tensor
    values: Tensor

    def prepare(self) -> None:
        """Try out the kernels of its products, which a capture cannot do."""
        super().prepare()
        if self.queries is not None:
            self.queries.prepare()

    def attend(
        self,
        x: Any,
        stream: Tensor,
        layer: int,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> tuple[Any, Tensor]:
        """Attend, and add the result to the stream; see `Block.attend`."""
        return add_norm_for(
            self.feed.rows_format,
            self.o.parts(self._values(x, layer, positions, attend)),
            stream,
            self.post_norm,
            self.eps,
            rows=rows,
        )

    def _values(self, x: Any, layer: int, positions: Tensor, attend: Attend) -> Tensor:
        """Return what the output projection reads, ``[T, Hq v]``."""
        shape, count = self.geometry, len(positions)
        rank, rope = shape.v_head_dim, shape.head_dim - shape.v_head_dim
        parts = self.qkv.parts(x)
        asked, latent, turning = parts.split([parts.shape[-1] - rank - rope, rank, rope], dim=-1)
        table = self.rotary.rows
        turn = table[positions.clamp(max=len(table) - 1)].chunk(2, dim=-1)  # [T, rope / 2] each
        row = latent.new_empty(count, 1, shape.head_dim, dtype=shape.dtype)
        add_rms_norm(latent, None, self.latent_norm, self.latent_eps, out=row[:, 0, :rank])
        row[:, 0, rank:] = rotate(turning.float().sum(0), *turn)
        q = self._queries(asked, turn)
        out = attend(layer, q, row, row[..., :rank])  # [T, Hq, rank]
        return torch.einsum("thr,hvr->thv", out, self.values).flatten(1)

    def _queries(self, asked: Tensor, turn: tuple[Tensor, ...]) -> Tensor:
        """Return absorbed queries ``[T, Hq, rank + rope]``."""
        shape, nope = self.geometry, self.keys.shape[1]
        if self.queries is None:
            q = add_partials(asked, shape.dtype)
        else:
            assert self.query_norm is not None
            how, eps = self.queries.rows_format, self.latent_eps
            low, _ = add_norm_for(how, asked, None, self.query_norm, eps, dtype=shape.dtype)
            q = self.queries.product(low)
        still, turning = q.unflatten(-1, (shape.num_qo_heads, -1)).tensor_split([nope], dim=-1)
        turned = rotate(turning.float(), *(one[:, None] for one in turn)).to(shape.dtype)
        return torch.cat([torch.einsum("thn,hnr->thr", still, self.keys), turned], dim=-1)
