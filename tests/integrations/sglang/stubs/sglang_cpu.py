"""A plug-in of SGLang for tests: what its speculative workers lack on a CPU."""

import os
from importlib import import_module

#: Modules of SGLang 0.5.15, then of 0.5.23, that call sgl_kernel on a CPU and Triton on an XPU.
MODULES = {
    (0, 5, 15): (
        "sglang.srt.speculative.eagle_utils",
        "sglang.srt.speculative.triton_ops.cache_locs",
    ),
    (0, 5, 23): (
        "sglang.kernels.ops.kvcache.cache_move",
        "sglang.srt.mem_cache.allocation",
        "sglang.kernels.ops.speculative.cache_locs",
        "sglang.kernels.ops.speculative.eagle",
        "sglang.kernels.ops.speculative.spec_tree",
        # the layout of masks that its Triton backend reads
        "sglang.srt.speculative.eagle_utils",
    ),
}


def register():
    """Patch SGLang; it calls this in each of its processes."""
    import torch

    from specattn.integrations.sglang.names import release
    from tests.interpreter import patch_once, without_idle_checks

    patch_once()
    without_idle_checks()

    # events and streams that only CUDA has
    torch.Tensor.record_stream = lambda self, stream: None
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args, **options: None

    # SGLang's own Triton kernels, in the interpreter, in place of sgl_kernel's
    for name in MODULES[release()]:
        module = import_module(name)
        module._is_cpu, module._is_xpu = False, True

    # prompts of layers with states, whose operators are sgl_kernel's
    if release() == (0, 5, 15):
        from tests.integrations.sglang import delta

        delta.supply()

    # xgrammar's own, which SGLang calls on no CPU
    grammars = import_module("sglang.srt.constrained.xgrammar_backend")
    xgrammar = import_module("xgrammar")

    def apply_vocab_mask(self, logits, vocab_mask):
        xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)

    grammars.XGrammarGrammar.apply_vocab_mask = apply_vocab_mask

    if path := os.environ.get("SPECATTN_COUNTS"):
        from tests.integrations.sglang.counting import watch

        watch(path)
