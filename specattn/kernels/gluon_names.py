"""Names of Gluon that Triton's versions write differently."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

#: Wait for the warps of a partition: ``gl.barrier`` since Triton 3.8, before ``gl.thread_barrier``.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
