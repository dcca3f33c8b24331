"""Names that SGLang's modules of linear attention look up when they are imported."""

import torch

for _operator in (
    "fused_gdn_gating_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
):
    setattr(torch.ops.sgl_kernel, _operator, None)
