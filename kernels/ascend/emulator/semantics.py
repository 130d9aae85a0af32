"""What each operator of the catalogue computes, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from porter.kernels.ascend.catalogue.vendor_op import Call
from porter.kernels.ascend.emulator.activation import SEMANTICS as ACTIVATION
from porter.kernels.ascend.emulator.attention_fusion import SEMANTICS as ATTENTION_FUSION
from porter.kernels.ascend.emulator.cache import SEMANTICS as CACHE
from porter.kernels.ascend.emulator.delta_rule import SEMANTICS as DELTA_RULE
from porter.kernels.ascend.emulator.delta_rule_conv1d import SEMANTICS as DELTA_RULE_CONV1D
from porter.kernels.ascend.emulator.expert_parallel import SEMANTICS as EXPERT_PARALLEL
from porter.kernels.ascend.emulator.fused_infer_attention import SEMANTICS as FUSED_INFER_ATTENTION
from porter.kernels.ascend.emulator.grouped_matmul import SEMANTICS as GROUPED_MATMUL
from porter.kernels.ascend.emulator.hyper_connection import SEMANTICS as HYPER_CONNECTION
from porter.kernels.ascend.emulator.mla import SEMANTICS as MLA
from porter.kernels.ascend.emulator.norm import SEMANTICS as NORM
from porter.kernels.ascend.emulator.quant_matmul import SEMANTICS as QUANT_MATMUL
from porter.kernels.ascend.emulator.quantization import SEMANTICS as QUANTIZATION
from porter.kernels.ascend.emulator.quantization_fused import SEMANTICS as QUANTIZATION_FUSED
from porter.kernels.ascend.emulator.rope import SEMANTICS as ROPE
from porter.kernels.ascend.emulator.router import SEMANTICS as ROUTER
from porter.kernels.ascend.emulator.routing import SEMANTICS as ROUTING
from porter.kernels.ascend.emulator.sparse_attention import SEMANTICS as SPARSE_ATTENTION
from porter.kernels.ascend.emulator.sparse_attention_quant import SEMANTICS as SPARSE_ATTENTION_QUANT

Semantics = Callable[[Call], Any]

SEMANTICS: Mapping[str, Semantics] = {
    **CACHE,
    **MLA,
    **FUSED_INFER_ATTENTION,
    **ATTENTION_FUSION,
    **ACTIVATION,
    **ROPE,
    **NORM,
    **QUANTIZATION,
    **QUANTIZATION_FUSED,
    **QUANT_MATMUL,
    **SPARSE_ATTENTION,
    **DELTA_RULE,
    **ROUTER,
    **ROUTING,
    **GROUPED_MATMUL,
    **EXPERT_PARALLEL,
    **SPARSE_ATTENTION_QUANT,
    **DELTA_RULE_CONV1D,
    **HYPER_CONNECTION,
}
"""The CPU computation of each operator, given a call that the catalogue has checked."""
