"""Float8 pools: scales, what a forward stores and reads, and speculation over them."""

from __future__ import annotations

import math

import pytest
import torch

from specattn.attention.layers import LayeredBackend
from specattn.backends import choose_backend
from specattn.backends.by_phase import by_phase
from specattn.batch import AcceptResult
from specattn.cache.kv_pool import KVPool
from specattn.config import AttnConfig, KVScales, SpecConfig
from specattn.engine.engine import Engine, Request
from specattn.errors import CaptureMismatch, UnsupportedError
from tests import tiny
from tests.kernels.test_float8 import nearest
from tests.samples import half, on_cpu
from tests.tiny import DenseAttend, TinyDraft, TinyTarget
from tests.worlds import BACKENDS, DEVICE, MODES, part_of, world

FLOAT8 = torch.float8_e4m3fn
HEADS = AttnConfig(4, 2, 8, v_head_dim=5)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7 * i % 61 for i in range(40)], [11]]


def slots_of(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)[:, None]


def test_every_layer_is_stored_by_its_scales():
    scales = [KVScales(0.5, 0.01), KVScales(2.0, 3.0)]
    pool = KVPool([HEADS, HEADS], 12, DEVICE, kv_dtype=FLOAT8, scales=scales)
    assert pool.k.dtype == pool.v.dtype == FLOAT8
    assert pool.k.nbytes == 2 * 12 * 2 * 8
    k, v = torch.randn(2, 2, 8, device=DEVICE), torch.randn(2, 2, 5, device=DEVICE)
    for layer, scale in enumerate(scales):
        pool.store(layer, slots_of(7, 1), k, v)
        for cache, new, factor in ((pool.k, k, scale.k), (pool.v, v, scale.v)):
            got = cache[layer].float()[[7, 1]] * factor
            torch.testing.assert_close(got, new, rtol=2**-4, atol=factor * 2**-10)
    pool.k[:, [7, 1]] = 0
    assert not pool.k.float().any(), "other slots were written"


def test_a_commit_moves_what_is_stored():
    pool = KVPool([HEADS], 12, DEVICE, kv_dtype=FLOAT8, scales=[KVScales(0.3, 0.7)])
    pool.k.copy_(torch.randn(pool.k.shape))
    want = pool.k.float().clone()
    tail = torch.tensor([[7, 3, 11, 1]], dtype=torch.int32, device=DEVICE)
    want[:, 3] = want[:, 11]
    path = torch.tensor([[0, 2, -1]], dtype=torch.int32, device=DEVICE)
    tokens = path.long()
    pool.commit(tail, AcceptResult(path, tokens, path.new_tensor([2]), tokens[:, 1]))
    assert torch.equal(pool.k.float(), want)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"kv_dtype": torch.int8}, r"kv_dtype must be dtype \(torch\.float32\) or"),
        ({"scales": [KVScales()]}, r"scales are those of float8 pools"),
        ({"kv_dtype": FLOAT8, "scales": [KVScales()]}, "scales must be one per layer, 2, got 1"),
        ({"kv_dtype": FLOAT8, "scales": []}, "scales must be one per layer, 2, got 0"),
    ],
)
def test_pools_refuse_what_makes_no_sense(options, named):
    with pytest.raises(ValueError, match=named):
        KVPool([HEADS, HEADS], 12, "cpu", **options)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e-40, 1e39])
def test_a_scale_is_a_positive_number(scale):
    for name in ("k", "v"):
        with pytest.raises(ValueError, match=rf"{name} .* must be a normal float32 above 0"):
            KVScales(**{name: scale})


def test_scales_of_a_sample_use_the_range():
    k, v = torch.randn(3, 50, 2, 8), torch.randn(3, 50, 2, 5)
    k[1], v[2] = k[1] * 1e-4, 0
    found = KVScales.of(k.half(), v.half(), headroom=1.0)
    for layer, scale in enumerate(found):
        assert scale.k == pytest.approx(k[layer].half().abs().max().item() / 448)
    assert found[2].v == 1, "nothing but zeros"
    assert KVScales.of(k, v)[0].k == pytest.approx(2 * k[0].abs().max().item() / 448)
    assert KVScales.of([*k], [*v]) == KVScales.of(k, v)
    with pytest.raises(ValueError, match="same layers, got 3 and 2"):
        KVScales.of(k, v[:2])
    k[0, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="must be a normal float32"):
        KVScales.of(k, v)


def test_layers_of_one_geometry_share_a_backend_whatever_their_scales():
    scales = [KVScales(float(n), 1.0) for n in (1, 2, 3)]
    pool = KVPool([HEADS] * 3, 12, "cpu", kv_dtype=FLOAT8, scales=scales)
    layered = LayeredBackend("torch_native", pool.layers, pool, torch.device("cpu"))
    assert len(layered.groups) == 1


def test_layers_and_pool_must_agree():
    pool = KVPool([HEADS], 12, "cpu", kv_dtype=FLOAT8)
    with pytest.raises(ValueError, match="layers must have the pool's kv_dtype"):
        LayeredBackend("torch_native", [HEADS], pool, torch.device("cpu"))


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_scales_that_changed_after_capture_are_refused(mode):
    one = world(BACKENDS[0], [2], kv_dtype=FLOAT8)
    (captured,) = one.decoder.runner.ready((part_of(mode),), 1)
    captured.compare()
    for pool in one.pools:
        with pytest.raises(AttributeError, match=r"KVPool\.scales is read-only"):
            pool.scales = tuple(KVScales(2.0, 1.0) for _ in pool.layers)
        vars(pool)["scales"] = tuple(KVScales(2.0, 1.0) for _ in pool.layers)
    with pytest.raises(CaptureMismatch, match="kv_scales changed since capture"):
        captured.compare()


class Unaware:
    """A backend of another package, made before KV had a dtype of its own."""

    name = "unaware"
    capabilities = choose_backend("flex", [HEADS], torch.device("cpu")).capabilities

    @staticmethod
    def reasons(config, device):
        return []


def test_a_backend_that_knows_nothing_of_it_is_refused():
    config = AttnConfig(4, 2, 8, kv_dtype=FLOAT8)
    with pytest.raises(UnsupportedError, match=r"'unaware' on cpu: kv_dtype must be .*32, got"):
        choose_backend(Unaware, [config], torch.device("cpu"))
    assert choose_backend(Unaware, [HEADS], torch.device("cpu")) is Unaware


class RoundedAttend(DenseAttend):
    """Dense attention over keys and values that were rounded to float8 when they were made."""

    def __init__(self, layers, scales) -> None:
        super().__init__(layers)
        self.scales = scales

    def __call__(self, layer, q, k, v):
        s = self.scales[layer]
        k, v = (nearest((x / f).cpu()).to(x) * f for x, f in ((k, s.k), (v, s.v)))
        return super().__call__(layer, q, k, v)


BACKEND_KINDS = {
    "torch_native": "torch_native",
    "by_phase": by_phase(prefill="torch_native", decode="torch_native"),
}


@on_cpu(half, "backend", "setting")
@pytest.mark.parametrize("setting", [(0, 1, 1), (4, 1, 5), (3, 4, 12)], ids=str)
@pytest.mark.parametrize("backend", BACKEND_KINDS.values(), ids=BACKEND_KINDS)
def test_speculation_writes_what_dense_decoding_over_rounded_keys_writes(
    backend, setting, monkeypatch
):
    target, draft = TinyTarget(device=DEVICE), TinyDraft(device=DEVICE)
    scales = tuple(KVScales(0.02 * (n + 1), 0.01) for n in range(len(target.layers)))
    engine = Engine(
        target,
        draft,
        SpecConfig(*setting, 128, 4),
        backend=backend,
        kv_dtype=FLOAT8,
        kv_scales=(scales, None),
    )
    found = engine.generate([Request(prompt, 20) for prompt in PROMPTS])
    monkeypatch.setattr(tiny, "DenseAttend", lambda layers: RoundedAttend(layers, scales))
    for prompt, result in zip(PROMPTS, found, strict=True):
        assert result.tokens == tiny.dense_greedy(target, prompt, 20)


def test_scales_can_come_from_a_pool_that_ran_prompts():
    target = TinyTarget(device=DEVICE)
    config = SpecConfig(0, 1, 1, 64, 4)
    plain = Engine(target, None, config, backend="torch_native")
    plain.generate([Request(prompt[:8], 1) for prompt in PROMPTS])
    pool = plain.target.pool
    scales = KVScales.of(pool.k, pool.v)
    engine = Engine(
        target, None, config, backend="torch_native", kv_dtype=FLOAT8, kv_scales=(scales, None)
    )
    engine.generate([Request(prompt[:8], 1) for prompt in PROMPTS])
    stored = engine.target.pool
    for layer, scale in enumerate(scales):
        # half of the range is headroom
        assert 200 <= stored.k[layer].float().abs().max() <= 240
        back = stored.k[layer].float() * scale.k
        # the first layer's keys are the same; later ones are of rounded inputs
        assert (back - pool.k[layer]).norm() < 0.2 * pool.k[layer].norm()
