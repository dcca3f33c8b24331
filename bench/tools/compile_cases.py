"""The launches that `bench.tools.compile_targets` compiles, by name."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from bench.tools.compile_attention import (
    attend,
    attend_deterministic,
    attend_latent,
    plan_step,
    prompt,
    prompt_latent,
)
from bench.tools.compile_offline import BF16, F16, F32, FLOAT8
from bench.tools.compile_small import (
    accepts,
    beams,
    best_first_tree,
    build_tree,
    choices,
    copies_in,
    glue_kernels,
    index_lists,
    kv_operations,
    laws,
    log_probs,
    lookups,
    processing,
    products,
    step_ends,
    windows,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# the first ones are the quick set: each kernel, and each class of tiles in one dtype
QUICK: dict[str, Callable[[], None]] = {
    "64 rows, window, cap, lse, f16": partial(attend, 8, 8, F16, window=99, cap=30.0, lse=True),
    "256 rows, bf16": partial(attend, 64, 64, BF16),
    "16 rows, index lists, bf16": partial(attend, 1, 0, BF16, csr=True),
    "plans of a step": plan_step,
    "deterministic, 64 rows, bf16": partial(attend_deterministic, 8, 8, BF16),
    "prompt, bf16": partial(prompt, BF16),
    "64 rows, float8 keys, bf16": partial(attend, 8, 8, BF16, stored=FLOAT8),
    "latent, 16 rows, bf16": partial(attend_latent, 1, 1, BF16),
    "latent, 64 rows, bf16": partial(attend_latent, 4, 4, BF16),
    "latent prompt, bf16": partial(prompt_latent, BF16),
    "gluon, 64 rows, bf16": partial(attend, 8, 8, BF16, gluon=True, lse=True),
    "gluon, 256 rows of pages, bf16": partial(attend, 64, 64, BF16, gluon=True, page=16),
    "gluon, 64 rows, float8 keys, bf16": partial(attend, 8, 8, BF16, gluon=True, stored=FLOAT8),
    "gluon, later layer, window, cap, f16": partial(
        attend, 1, 1, F16, gluon=True, window=99, cap=30.0, prefetch=True
    ),
    "gluon, prompt, bf16": partial(prompt, BF16, gluon=True),
    "gluon, prompt, float8 keys, bf16": partial(prompt, BF16, gluon=True, stored=FLOAT8),
    "gluon, latent, 64 rows, bf16": partial(attend_latent, 4, 4, BF16, gluon=True),
    "gluon, products, bf16": partial(products, BF16),
    "tree": build_tree,
    "best-first tree": best_first_tree,
    "lookups": lookups,
    "beams": beams,
    "accept": accepts,
    "copy in": copies_in,
    "choose": choices,
    "kv": kv_operations,
    "glue": glue_kernels,
    "lists": index_lists,
    "windows": windows,
    "step": step_ends,
    "laws": laws,
    "log-probabilities": log_probs,
    "logits processors": processing,
}
CASES = QUICK | {
    "16 rows, bf16": partial(attend, 4, 4, BF16),
    "64 rows, bf16": partial(attend, 8, 8, BF16),
    "400 rows, 2 words, bf16": partial(attend, 100, 100, BF16),
    "draft step 9, topk 8, bf16": partial(attend, 8, 80, BF16),
    "256 rows, window, lse, f16": partial(attend, 64, 64, F16, window=99, lse=True),
    "64 rows, head 64, bf16": partial(attend, 8, 8, BF16, dim=64),
    "64 rows, head 96, bf16": partial(attend, 8, 8, BF16, dim=96),
    "32 rows, head 256, bf16": partial(attend, 8, 8, BF16, dim=256, heads=(16, 4)),
    "256 rows, head 256, bf16": partial(attend, 64, 64, BF16, dim=256, heads=(16, 4)),
    "32 rows, f32": partial(attend, 8, 8, F32),
    "256 rows, head 256, window, cap, lse, f32": partial(
        attend, 64, 64, F32, dim=256, heads=(16, 4), window=99, cap=30.0, lse=True
    ),
    "deterministic, 4 rows, bf16": partial(attend_deterministic, 1, 1, BF16),
    "deterministic, 256 rows, window, cap, f16": partial(
        attend_deterministic, 64, 64, F16, window=99, cap=30.0
    ),
    "deterministic, 32 rows, head 256, bf16": partial(
        attend_deterministic, 8, 8, BF16, dim=256, heads=(16, 4)
    ),
    "deterministic, 32 rows, f32": partial(attend_deterministic, 8, 8, F32),
    "prompt, window, cap, lse, f16": partial(prompt, F16, window=99, cap=30.0, lse=True),
    "prompt, head 256, bf16": partial(prompt, BF16, dim=256),
    "prompt, f32": partial(prompt, F32),
    "16 rows, index lists, float8 keys, bf16": partial(attend, 1, 0, BF16, csr=True, stored=FLOAT8),
    "64 rows, window, cap, lse, float8 keys, f16": partial(
        attend, 8, 8, F16, window=99, cap=30.0, lse=True, stored=FLOAT8
    ),
    "256 rows, float8 keys, bf16": partial(attend, 64, 64, BF16, stored=FLOAT8),
    "64 rows, head 64, float8 keys, bf16": partial(attend, 8, 8, BF16, dim=64, stored=FLOAT8),
    "32 rows, head 256, float8 keys, bf16": partial(
        attend, 8, 8, BF16, dim=256, heads=(16, 4), stored=FLOAT8
    ),
    "256 rows, head 256, float8 keys, bf16": partial(
        attend, 64, 64, BF16, dim=256, heads=(16, 4), stored=FLOAT8
    ),
    "prompt, float8 keys, bf16": partial(prompt, BF16, stored=FLOAT8),
    "prompt, head 256, float8 keys, bf16": partial(prompt, BF16, dim=256, stored=FLOAT8),
    "kv, float8": partial(kv_operations, stored=FLOAT8),
    "latent, 32 rows, f16": partial(attend_latent, 2, 2, F16),
    "latent, 512 rows, bf16": partial(attend_latent, 4, 4, BF16, heads=128),
    "latent, 16 rows, f32": partial(attend_latent, 1, 1, F32),
    "latent prompt, f32": partial(prompt_latent, F32),
    "sinks, 64 rows, window, lse, bf16": partial(
        attend, 8, 8, BF16, window=127, lse=True, sinks=BF16
    ),
    "sinks, 32 rows, cap, f32": partial(attend, 8, 8, F32, cap=30.0, sinks=F32),
    "sinks, 16 rows, index lists, bf16": partial(attend, 1, 0, BF16, csr=True, sinks=F32),
    "sinks, deterministic, 64 rows, bf16": partial(attend_deterministic, 8, 8, BF16, sinks=BF16),
    "sinks, prompt, bf16": partial(prompt, BF16, sinks=BF16),
    "sinks, gluon, 64 rows, lse, bf16": partial(
        attend, 8, 8, BF16, gluon=True, lse=True, sinks=BF16
    ),
    "sinks, gluon, 64 rows, head 64, window, bf16": partial(
        attend, 8, 8, BF16, dim=64, heads=(64, 8), gluon=True, window=127, sinks=BF16
    ),
    "sinks, gluon, 256 rows of pages, bf16": partial(
        attend, 64, 64, BF16, gluon=True, page=16, sinks=F32
    ),
    "sinks, gluon, 64 rows, float8 keys, bf16": partial(
        attend, 8, 8, BF16, gluon=True, stored=FLOAT8, sinks=F32
    ),
    "sinks, gluon, later layer, cap, f16": partial(
        attend, 1, 1, F16, gluon=True, cap=30.0, prefetch=True, sinks=F16
    ),
    "sinks, gluon, prompt, bf16": partial(prompt, BF16, gluon=True, sinks=BF16),
    "tree, 4 x 5, 16 nodes": partial(build_tree, 4, 5, 16),
    "best-first tree, 256 nodes": partial(best_first_tree, 256),
    "lookups, 256 nodes": partial(lookups, 32, 15, 256),
    "lookups, a chain": partial(lookups, 1, 5, 6),
    "laws, f32": partial(laws, F32, 151936),
    "choose 64, f32": partial(choices, F32, 64, 151936),
    "gluon, products, f16": partial(products, F16),
    "kv, f32": partial(kv_operations, F32),
}
