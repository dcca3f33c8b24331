"""Trees by one solve, against the recurrence along each node's path in float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from specattn.kernels.gated_delta import Tokens, convolve_nodes, tiles, verify_nodes
from specattn.kernels.gated_delta.tokens import of_value_heads
from tests.implementations import IMPLEMENTATIONS, using
from tests.kernels.gated_delta.oracle import (
    DEVICE,
    GATES,
    KINDS,
    NAN,
    Shape,
    apart,
    at,
    exact_mixed,
    exact_path,
    exact_tree,
    parts_for,
    path_to,
    tokens_of,
    tree,
    unwritten,
    weights_for,
    words_of_trees,
)
from tests.samples import half, on_cpu

# errors by the root mean square of outputs
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
by_each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def verified(shape, trees, gates="model", *, alike=False, seed=0, rows=None, **options):
    """Return outputs ``[B, n, HV, V]``, and what is right."""
    n, batch = len(trees[0]), len(trees)
    rows = list(range(1, batch + 1)) if rows is None else rows
    tokens = tokens_of(shape, batch * n, gates, alike=alike, seed=seed)
    states = torch.full_like(shape.new_states(max(rows) + 2), NAN)
    for row in rows:
        states[row] = shape.new_states(1, seed=row)[0]
    before = states.clone()
    where, words = torch.tensor(rows, device=DEVICE), words_of_trees(trees)
    found = verify_nodes(tokens, states, where, words, **options)
    assert torch.equal(states.nan_to_num(7.0), before.nan_to_num(7.0)), "states are read alone"
    want = [
        exact_tree(at(tokens, slice(n * i, n * i + n)), states[row], parents)
        for i, (row, parents) in enumerate(zip(rows, trees, strict=True))
    ]
    return found.unflatten(0, (batch, n)), torch.stack(want)


@on_cpu(half, "n", "kind", "gates", "implementation")
@by_each
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 7, 16, 33])
def test_a_tree_is_the_recurrence_of_every_path(n, kind, gates, implementation):
    with using(implementation):
        found, want = verified(Shape((1, 2)), [tree(kind, n, n)], gates, seed=n)
    assert apart(found, want) < TOLERANCE[torch.float32]


@by_each
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("kind", ["chain", "any", "shallow"])
def test_sixty_four_nodes(kind, gates, implementation):
    with using(implementation):
        found, want = verified(Shape((1, 1), (32, 16)), [tree(kind, 64, 1)], gates)
    assert apart(found, want) < TOLERANCE[torch.float32]


@by_each
@pytest.mark.parametrize("n", [8, 9, 16, 64])
@pytest.mark.parametrize("kind", ["chain", "deep"])
def test_keys_alike_with_beta_1(kind, n, implementation):
    """What doubling gets wrong by 1e11: an inverse whose powers cancel."""
    with using(implementation):
        found, want = verified(Shape((1, 2)), [tree(kind, n)], "one", alike=True)
    assert apart(found, want) < 2e-5


@by_each
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 5, 20])
def test_dtypes(n, states, dtype, implementation):
    shape = Shape((2, 4), (16, 16), dtype=dtype, states=states)
    with using(implementation):
        found, want = verified(shape, [tree("any", n, seed) for seed in range(2)])
    assert found.dtype == dtype
    assert apart(found, want) < TOLERANCE[dtype]


@by_each
@pytest.mark.parametrize("heads", [(1, 1), (3, 3), (1, 5), (5, 15)])
@pytest.mark.parametrize("dims", [(16, 16), (64, 16), (16, 128)])
def test_heads_and_dimensions(dims, heads, implementation):
    with using(implementation):
        found, want = verified(Shape(heads, dims), [tree("any", 5)])
    assert apart(found, want) < TOLERANCE[torch.float32]


@by_each
def test_a_model_of_bfloat16_keeps_16_bits_of_its_states(implementation):
    """Two numbers of 8 bits stand for one of float32: one would cancel to nothing here."""
    shape = Shape((1, 1), (16, 16), dtype=torch.bfloat16)
    tokens, states = tokens_of(shape, 2), shape.new_states(2)
    tokens.beta.zero_(), tokens.g.zero_(), tokens.q.zero_()
    tokens.q[..., :2] = 1
    states[1, ..., 0], states[1, ..., 1] = 1 + 2**-11, -1 - 2**-13
    rows, words = torch.tensor([1], device=DEVICE), words_of_trees([tree("chain", 2)])
    with using(implementation):
        found = verify_nodes(tokens, states, rows, words)
    want = torch.full((2, 1, 16), (2**-11 - 2**-13) / 2**0.5 / 4)
    assert apart(found, want) < 2e-2


@by_each
def test_requests_may_lie_in_any_rows(implementation):
    trees = [tree(kind, 6, 3) for kind in KINDS]
    with using(implementation):
        found, want = verified(Shape(), trees, rows=[5, 1, 9, 2, 4])
        assert apart(found, want) < TOLERANCE[torch.float32]


@by_each
def test_padding_reads_row_0_and_harms_nobody(implementation):
    shape, n = Shape(), 5
    tokens, states = tokens_of(shape, 3 * n), shape.new_states(4)
    states[0] = NAN
    rows, words = torch.tensor([2, 0, 3], device=DEVICE), words_of_trees([tree("any", n)] * 3)
    with using(implementation):
        found = verify_nodes(tokens, states, rows, words).unflatten(0, (3, n))
    for which, row in ((0, 2), (2, 3)):
        own = at(tokens, slice(which * n, which * n + n))
        assert apart(found[which], exact_tree(own, states[row], tree("any", n))) < 2e-5


@by_each
def test_other_branches_and_later_nodes_are_not_seen(implementation):
    shape, parents = Shape((1, 2), (16, 16)), [-1, 0, 0, 1, 1, 2, 2, 3]
    tokens, states = tokens_of(shape, 8), shape.new_states(2)
    rows, words = torch.tensor([1], device=DEVICE), words_of_trees([parents])
    with using(implementation):
        found = verify_nodes(tokens, states, rows, words)
        tokens.v[[2, 4, 5, 6, 7]] = 1e30
        other = verify_nodes(tokens, states, rows, words)
    assert torch.equal(found[[0, 1, 3]], other[[0, 1, 3]])


@by_each
def test_gates_of_other_branches_overflow_nothing(implementation):
    """A difference of path sums may be of any size where neither is above the other."""
    shape, parents = Shape((1, 1), (16, 16)), [-1, 0, 0, 1, 2]
    tokens, states = tokens_of(shape, 5), shape.new_states(2)
    tokens.g[:] = torch.tensor([0.0, -1e5, 0.0, -1e5, 0.0], device=DEVICE)[:, None]
    rows, words = torch.tensor([1], device=DEVICE), words_of_trees([parents])
    with using(implementation):
        found = verify_nodes(tokens, states, rows, words)
    assert apart(found, exact_tree(tokens, states[1], parents)) < 1e-5


@by_each
@pytest.mark.parametrize("n", [1, 2, 4, 5])
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16])
def test_a_chain_is_the_recurrence_whatever_reads_it(states, n, implementation):
    shape = Shape((1, 3), states=states)
    with using(implementation):
        found, want = verified(shape, [tree("chain", n)] * 2, follows=True)
    assert apart(found, want) < (2e-5 if states == torch.float32 else 6e-2)


@on_cpu(half, "n", "limits", "dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limits", [{"ONE": 8}, {"FEW": 0}, {"FEW": 64}])
@pytest.mark.parametrize("n", [4, 16, 17])
def test_programs_of_any_number_take_other_tiles(n, limits, dtype):
    """One kernel or two, over more or fewer values."""
    shape = Shape((2, 4), (16, 128), dtype=dtype)
    with mock.patch.multiple(tiles, **limits), using("triton"):
        found, want = verified(shape, [tree("any", n, seed) for seed in range(2)])
    assert apart(found, want) < TOLERANCE[dtype]


@on_cpu(half, "dtype", "n", "split", "width", "implementation")
@by_each
@pytest.mark.parametrize("width", [2, 4, 5])
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("n", [1, 3, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_convolution_reads_ancestors(dtype, n, split, width, implementation):
    shape = Shape((1, 3), (16, 32), dtype=dtype, width=width)
    trees = [tree(kind, n, 2) for kind in KINDS]
    parts, weights = parts_for(shape, len(trees) * n, split=split), weights_for(shape)
    rows, windows = torch.tensor([3, 1, 6, 2, 0], device=DEVICE), shape.new_windows(8)
    windows[[4, 5, 7]] = NAN
    out = unwritten(shape, len(trees) * n)
    inputs = torch.full((len(trees) * n, shape.channels), NAN, dtype=dtype, device=DEVICE)
    with using(implementation):
        words = words_of_trees(trees)
        convolve_nodes(parts, weights, windows, rows, words, inputs=inputs, out=out)
    assert torch.equal(inputs, parts.qkv.float().sum(0).to(dtype))
    limit = 1e-5 if dtype == torch.float32 else 6e-3
    rounded = []
    for which, parents in enumerate(trees):
        texts = exact_texts(shape, parts, weights, windows[rows[which]], parents, which * n)
        for node, (want, place) in enumerate(texts):
            for name in ("q", "k", "v", "g", "beta"):
                found, exact = getattr(out, name)[which * n + node], getattr(want, name)[place]
                assert apart(found, exact) < limit, (name, which, node)
                if name != "g":
                    rounded.append((found == exact.to(dtype)).float().mean())
    # what is rounded to the model's dtype at other places has other numbers, half of the time
    if dtype == torch.float16:
        assert torch.stack(rounded).mean() > 0.97
        assert torch.stack(rounded[3::4]).mean() > 0.97


def exact_texts(shape, parts, weights, window, parents, first):
    """Return for every node a text that it is in, and its place there: a text per leaf."""
    texts = [None] * len(parents)
    for leaf in (node for node in range(len(parents)) if node not in parents):
        path = path_to(parents, leaf)
        own = [first + node for node in path]
        want = exact_mixed_of(shape, parts, weights, window, own)
        for place, node in enumerate(path):
            texts[node] = want, place
    return texts


def exact_mixed_of(shape, parts, weights, window, path):
    own = type(parts)(*(one[:, path] for one in vars(parts).values()))
    return exact_mixed(shape, own, weights, window)[0]


@by_each
def test_gates_are_exact_at_both_ends(implementation):
    """Softplus of numbers far below 0, where 1 + e^x is 1, and far above."""
    shape = Shape((1, 1), (16, 16))
    parts, weights = parts_for(shape, 6), weights_for(shape)
    parts.a[0, :, 0] = torch.tensor([-60.0, -20.0, -9.0, 0.0, 15.0, 40.0])
    weights.dt_bias.zero_()
    parts.b[0, :, 0] = torch.tensor([-90.0, -9.0, 0.0, 1.0, 9.0, 90.0])
    out, inputs = unwritten(shape, 6), torch.empty(6, shape.channels, device=DEVICE)
    rows, words = torch.tensor([1], device=DEVICE), words_of_trees([tree("any", 6)])
    with using(implementation):
        windows = shape.new_windows(2)
        convolve_nodes(parts, weights, windows, rows, words, inputs=inputs, out=out)
    a, b = parts.a[0].double(), parts.b[0].double()
    want = -weights.a_log.double().exp() * torch.log1p(a.exp())
    torch.testing.assert_close(out.g.double(), want, rtol=1e-5, atol=0)
    torch.testing.assert_close(out.beta.double(), b.sigmoid(), rtol=1e-5, atol=1e-30)


def test_oracles_agree_with_transformers():
    """The recurrence of this folder is that of the models' own code, in either form."""
    models = [
        pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
        for name in ("qwen3_next", "qwen3_5")
    ]
    shape = Shape((2, 6), (32, 16))
    tokens, state = tokens_of(shape, 70), shape.new_states(1)
    want, last = exact_path(tokens, state[0])
    # transformers repeats heads of keys within its rules, or in front of them
    heads = [of_value_heads(one, 6)[None] for one in (tokens.q, tokens.k, tokens.v)]
    gates = {"g": tokens.g[None], "beta": tokens.beta[None]}
    for model in models:
        for rule in (model.torch_recurrent_gated_delta_rule, model.torch_chunk_gated_delta_rule):
            found, after = rule(
                *heads,
                **gates,
                initial_state=state.mT,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            assert apart(found[0], want) < 1e-4
            assert apart(after[0].mT, last) < 1e-4


@by_each
def test_a_chain_is_what_transformers_computes(implementation):
    model = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    shape, n = Shape((2, 6), (32, 16)), 12
    parts, weights, windows = parts_for(shape, n), weights_for(shape), shape.new_windows(2)
    rows, words = torch.tensor([1], device=DEVICE), words_of_trees([tree("chain", n)])
    out, inputs = unwritten(shape, n), torch.empty(n, shape.channels, device=DEVICE)
    states = shape.new_states(2)
    with using(implementation):
        convolve_nodes(parts, weights, windows, rows, words, inputs=inputs, out=out)
        found = verify_nodes(out, states, rows, words)
    mixed = model.causal_conv1d_update(
        parts.qkv[0].T[None].contiguous(), windows[1:].clone(), weights.conv, None, "silu"
    )[0].T
    (hk, hv), (k_dim, v_dim) = shape.heads, shape.dims
    q, k, v = mixed.split([hk * k_dim, hk * k_dim, hv * v_dim], 1)
    heads = [of_value_heads(one.unflatten(1, (hk, k_dim)), hv) for one in (q, k)]
    heads.append(v.unflatten(1, (hv, v_dim)))
    g = -weights.a_log.exp() * torch.nn.functional.softplus(parts.a[0] + weights.dt_bias)
    want, _ = model.torch_recurrent_gated_delta_rule(
        *(one[None] for one in heads),
        g=g[None],
        beta=parts.b[0].sigmoid()[None],
        initial_state=states[1:].mT,
        use_qk_l2norm_in_kernel=True,
    )
    assert apart(found, want[0]) < 1e-4


def test_mistakes_are_refused_by_name():
    shape, n = Shape(), 3
    tokens, states = tokens_of(shape, n), shape.new_states(2)
    rows, words = torch.tensor([1], device=DEVICE), words_of_trees([tree("any", n)])
    with pytest.raises(ValueError, match=r"^states must be \[2, 6, 32, 16\]"):
        verify_nodes(tokens, states.mT.contiguous(), rows, words)
    with pytest.raises(ValueError, match=r"^words must be \[1, 3, 1\] torch.int64"):
        verify_nodes(tokens, states, rows, words.int())
    with pytest.raises(ValueError, match=r"^rows must be \[1\] torch.int64"):
        verify_nodes(tokens, states, rows.int(), words)
    with pytest.raises(ValueError, match=r"^words must be those of 3 nodes"):
        verify_nodes(tokens, states, rows, words[:, :2].contiguous())
    odd = Tokens(
        tokens.q,
        tokens.k,
        tokens.v[:, :3].contiguous(),
        *(one[:, :3].contiguous() for one in (tokens.g, tokens.beta)),
    )
    with pytest.raises(ValueError, match=r"^v must have a multiple of 2 heads, got 3"):
        verify_nodes(odd, states[:, :3].contiguous(), rows, words)
    many, wide = tokens_of(shape, 65), torch.zeros(1, 65, 1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"^a tree must have at most 64 nodes, got 65"):
        verify_nodes(many, states, rows, wide)
    with pytest.raises(ValueError, match=r"^words must be \[1, 65, 1\]"):
        verify_nodes(many, states, rows, torch.cat([wide, wide], 2))
    parts, weights, windows = parts_for(shape, n), weights_for(shape), shape.new_windows(2)
    inputs = torch.empty(n, shape.channels, device=DEVICE)
    given = {"inputs": inputs, "out": tokens}
    with pytest.raises(ValueError, match=r"^windows must be \[2, 256, 3\] torch.float32"):
        convolve_nodes(parts, weights, windows.mT.contiguous(), rows, words, **given)
    with pytest.raises(ValueError, match=r"^inputs must be \[3, 256\]"):
        convolve_nodes(parts, weights, windows, rows, words, **(given | {"inputs": inputs[:2]}))


def test_no_requests_are_nothing_to_do():
    shape = Shape()
    none = torch.zeros(0, 3, 1, dtype=torch.int64, device=DEVICE)
    rows = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    for implementation in IMPLEMENTATIONS:
        with using(implementation):
            assert not len(verify_nodes(tokens_of(shape, 0), shape.new_states(2), rows, none))
