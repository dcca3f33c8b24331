"""Adapters of libraries keep what they declare, over stand-ins of the libraries, on the CPU."""

from __future__ import annotations

from specattn.testing import Geometry
from specattn.testing.plugin import backend_suite
from tests.backends.stand_ins import standing_in
from tests.samples import half_of_kit
from tests.testing.test_kit_passes import OF_PARTS

LATENT = Geometry(heads=(4, 1), head_dim=576, v_head_dim=512, latent=True)
PAGES = Geometry(page_size=16)

test_fa3 = half_of_kit(backend_suite(standing_in("fa3"), "cpu", evicts=True))
# what pages have to do with
test_fa3_pages = half_of_kit(
    backend_suite(standing_in("fa3"), "cpu", geometry=PAGES, evicts=True, leave_out=OF_PARTS)
)
test_fa4 = half_of_kit(backend_suite(standing_in("fa4"), "cpu"))
test_fa4_whole_pages = backend_suite(standing_in("fa4"), "cpu", "smoke", whole_pages=True)
test_trtllm_mha = half_of_kit(backend_suite(standing_in("trtllm_mha"), "cpu"))
test_trtllm_mla = half_of_kit(backend_suite(standing_in("trtllm_mla"), "cpu", geometry=LATENT))
test_cutlass_mla = half_of_kit(backend_suite(standing_in("cutlass_mla"), "cpu", geometry=LATENT))
test_flashmla = half_of_kit(backend_suite(standing_in("flashmla"), "cpu", geometry=LATENT))
