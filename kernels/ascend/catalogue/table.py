"""Every operator of the catalogue by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from porter.kernels.ascend.catalogue.activation import OPS as ACTIVATION
from porter.kernels.ascend.catalogue.attention_fusion import OPS as ATTENTION_FUSION
from porter.kernels.ascend.catalogue.cache import OPS as CACHE
from porter.kernels.ascend.catalogue.delta_rule import OPS as DELTA_RULE
from porter.kernels.ascend.catalogue.delta_rule_conv1d import OPS as DELTA_RULE_CONV1D
from porter.kernels.ascend.catalogue.expert_parallel import OPS as EXPERT_PARALLEL
from porter.kernels.ascend.catalogue.formats import OPS as FORMATS
from porter.kernels.ascend.catalogue.fused_infer_attention import OPS as FUSED_INFER_ATTENTION
from porter.kernels.ascend.catalogue.grouped_matmul import OPS as GROUPED_MATMUL
from porter.kernels.ascend.catalogue.grouped_matmul_fused import OPS as GROUPED_MATMUL_FUSED
from porter.kernels.ascend.catalogue.hyper_connection import OPS as HYPER_CONNECTION
from porter.kernels.ascend.catalogue.mla import OPS as MLA
from porter.kernels.ascend.catalogue.mla_products import OPS as MLA_PRODUCTS
from porter.kernels.ascend.catalogue.norm import OPS as NORM
from porter.kernels.ascend.catalogue.qkv_cache import OPS as QKV_CACHE
from porter.kernels.ascend.catalogue.quant_matmul import OPS as QUANT_MATMUL
from porter.kernels.ascend.catalogue.quantization import OPS as QUANTIZATION
from porter.kernels.ascend.catalogue.quantization_fused import OPS as QUANTIZATION_FUSED
from porter.kernels.ascend.catalogue.rope import OPS as ROPE
from porter.kernels.ascend.catalogue.router import OPS as ROUTER
from porter.kernels.ascend.catalogue.routing import OPS as ROUTING
from porter.kernels.ascend.catalogue.routing_permute import OPS as ROUTING_PERMUTE
from porter.kernels.ascend.catalogue.sparse_attention import OPS as SPARSE_ATTENTION
from porter.kernels.ascend.catalogue.sparse_attention_quant import OPS as SPARSE_ATTENTION_QUANT
from porter.kernels.ascend.catalogue.vendor_op import VendorOp


@cache
def catalogue() -> Mapping[str, VendorOp]:
    """The operators by name, in the order of their files. Raises ValueError where two share a name."""
    table: dict[str, VendorOp] = {}
    for op in (
        *FORMATS,
        *QKV_CACHE,
        *CACHE,
        *ACTIVATION,
        *ROPE,
        *NORM,
        *QUANTIZATION,
        *QUANTIZATION_FUSED,
        *QUANT_MATMUL,
        *SPARSE_ATTENTION,
        *SPARSE_ATTENTION_QUANT,
        *DELTA_RULE,
        *DELTA_RULE_CONV1D,
        *HYPER_CONNECTION,
        *ATTENTION_FUSION,
        *FUSED_INFER_ATTENTION,
        *MLA,
        *MLA_PRODUCTS,
        *ROUTER,
        *ROUTING,
        *ROUTING_PERMUTE,
        *GROUPED_MATMUL,
        *GROUPED_MATMUL_FUSED,
        *EXPERT_PARALLEL,
    ):
        if op.name in table:
            raise ValueError(f"two entries describe {op.name}")
        table[op.name] = op
    return table
