"""Projections against float64: products, rows, packing, and what ranks make of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specattn.models.fused.projection import ModuleProjection, Projection
from specattn.models.fused.readers import output_projection, projection_of

IN, OUT, TOKENS = 24, 14, 5


def drawn(rows: int = OUT, *, bias: bool = True) -> Projection:
    return Projection(torch.randn(rows, IN), torch.randn(rows) if bias else None)


def result(one: Projection, x: torch.Tensor) -> torch.Tensor:
    found = x.double() @ one.weight.double().T
    return found if one.bias is None else found + one.bias.double()


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert (got.double() - want).norm() < 3e-6 * want.norm()


@pytest.mark.parametrize("bias", [False, True])
def test_products(bias) -> None:
    one, x = drawn(bias=bias), torch.randn(TOKENS, IN)
    want = result(one, x)
    close(one.product(x), want)
    close(one.parts(x).sum(0), want)
    gate, up = want.chunk(2, dim=-1)
    close(one.gated(x), gate * gate.sigmoid() * up)
    close(one.rows(3).product(x), want[:, 3:])
    close(one.rows(2, 9).product(x), want[:, 2:9])
    order = torch.randperm(OUT)
    close(one.reordered(order).product(x), want[:, order])
    close(one.without_bias().product(x), result(Projection(one.weight), x))
    assert (one.in_features, one.out_features, one.dtype) == (IN, OUT, torch.float32)
    assert one.nbytes == IN * OUT * 4


def test_stacked_projections_are_side_by_side() -> None:
    parts, x = [drawn(3), drawn(4, bias=False), drawn(2)], torch.randn(TOKENS, IN)
    want = torch.cat([result(one, x) for one in parts], dim=1)
    close(Projection.stacked(parts).product(x), want)
    assert Projection.stacked([drawn(3, bias=False)] * 2).bias is None


def test_what_is_lent_is_the_projections_own_memory() -> None:
    modules = [nn.Linear(IN, 3), nn.Linear(IN, 5)]
    x = torch.randn(TOKENS, IN)
    want = [module(x) for module in modules]
    one = Projection.stacked([projection_of(module) for module in modules])
    one.lend(modules)
    for module, before in zip(modules, want, strict=True):
        assert module(x).equal(before)
    one.weight.data.mul_(2)
    one.bias.data.mul_(2)
    close(modules[1](x), 2 * want[1].detach().double())


def test_ranks_add_up_products_of_columns_and_gather_those_of_rows() -> None:
    whole, x = drawn(), torch.randn(TOKENS, IN)
    want = result(whole, x)
    # the other rank's product, without a bias, which one rank adds
    other = Projection(whole.weight[:, IN // 2 :]).product(x[:, IN // 2 :])
    mine = Projection(whole.weight[:, : IN // 2], whole.bias, lambda y: y + other)
    close(mine.parts(x[:, : IN // 2]).sum(0), want)
    rest = Projection(torch.cat([whole.weight[8:], torch.full((2, IN), torch.nan)]))
    gathered = Projection(
        whole.weight[:8], combine=lambda y: torch.cat([y, rest.product(x)], dim=1), size=OUT
    )
    assert gathered.out_features == OUT
    close(gathered.product(x), result(Projection(whole.weight), x))
    close(gathered.parts(x).sum(0), result(Projection(whole.weight), x))


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(x)


def test_logits_of_another_class_are_what_its_module_computes() -> None:
    module, x = Scaled(IN, OUT, bias=False).requires_grad_(False), torch.randn(TOKENS, IN)
    want = 3 * (x.double() @ module.weight.double().T)
    one = output_projection(module)
    assert isinstance(one, ModuleProjection)
    assert output_projection(one) is one
    close(one.product(x), want)
    close(one.rows(0, 9).product(x), want[:, :9])
    close(one.rows(2, 9).rows(1).product(x), want[:, 3:9])
    assert one.rows(2, 9).out_features == 7
    plain = output_projection(nn.Linear(IN, OUT))
    assert type(plain) is Projection
