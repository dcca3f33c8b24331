"""A plug-in of SGLang for tests: what its speculative workers lack on a CPU."""


def register():
    """Patch SGLang; it calls this in each of its processes."""
    import torch

    # events and streams that only CUDA has
    torch.Tensor.record_stream = lambda self, stream: None
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *args, **options: None

    from sglang.srt.speculative import eagle_utils

    # SGLang's own Triton kernels, in the interpreter, in place of sgl_kernel's
    eagle_utils._is_xpu = True
    try:
        from sglang.srt.speculative.triton_ops import cache_locs
    except ImportError:
        from sglang.kernels.ops.speculative import cache_locs
    cache_locs._is_xpu = True
