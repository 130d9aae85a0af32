"""Fused attention for inference: prefill, decode and multi-head latent attention, over dense, packed or paged keys."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.attention_layouts import PACKED, Geometry, Names, arranged, geometry, split_layout
from porter.kernels.ascend.catalogue.attention_mask_rules import mask_rules
from porter.kernels.ascend.catalogue.attention_rules import layout_rules, length_rules, on, size_rules
from porter.kernels.ascend.catalogue.attention_scenarios import (
    bias_rules,
    packed_rules,
    page_rules,
    rope_rules,
    value_rules,
)
from porter.kernels.ascend.catalogue.attention_schemas import FUSED_INFERENCE, FUSED_INFERENCE_SECOND
from porter.kernels.ascend.catalogue.rules import absent, contiguous, dtypes, one_of, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, PAGES, Call, Rule, VendorOp

FIRST = Names("num_heads", "scale", "actual_seq_lengths", "actual_seq_lengths_kv", "softmax_lse_flag")
SECOND = Names("num_query_heads", "softmax_scale", "actual_seq_qlen", "actual_seq_kvlen", "return_softmax_lse")

FIRST_QUANTIZATION = (
    "dequant_scale1 quant_scale1 dequant_scale2 quant_scale2 quant_offset2 antiquant_scale antiquant_offset "
    "key_antiquant_scale key_antiquant_offset value_antiquant_scale value_antiquant_offset key_rope_antiquant_scale"
).split()
SECOND_QUANTIZATION = (
    "dequant_scale_query dequant_scale_key dequant_offset_key dequant_scale_value dequant_offset_value "
    "dequant_scale_key_rope quant_scale_out quant_offset_out quant_scale_p"
).split()
RESERVED = (
    "query_dtype key_dtype value_dtype query_rope_dtype key_rope_dtype key_shared_prefix_dtype "
    "value_shared_prefix_dtype dequant_scale_query_dtype dequant_scale_key_dtype dequant_scale_value_dtype "
    "dequant_scale_key_rope_dtype out_dtype"
).split()
NOTE = (
    "atten_mask: True and 1 are masked out, the opposite of torch. sparse_mode 3: causal, aligned to the last query "
    "and key; 4: a band of pre_tokens before and next_tokens after that diagonal, so a window of w keys is w - 1. "
    "Result 1 is the logarithm of the sum of exponentials, or empty (one zero, the pages say). The pages list A2 and "
    "A3; op-plugin's own tests (test_npu_fused_infer_attention_score.py) and vllm-ascend's A5DeviceAdaptor run it on "
    "950 too"
)


def _rules(names: Names) -> tuple[Rule, ...]:
    return (
        *layout_rules(names),
        *size_rules(names),
        dtypes("query key value", "f16/f16/f16 bf16/bf16/bf16"),
        dtypes("query query_rope key_rope pse_shift", _optional("f16", 3) + " " + _optional("bf16", 3)),
        dtypes("atten_mask", "bool i8 u8"),
        contiguous("query", "key", "value", "query_rope", "key_rope", "pse_shift", "atten_mask"),
        *length_rules(names),
        *mask_rules(names),
        *bias_rules(names),
        *page_rules(names),
        *packed_rules(names),
        *rope_rules(names),
        on(
            names,
            "inner_precise 0 or 1 for one query, 0 to 3 for more",
            lambda c, g: c["inner_precise"] in ((0, 1) if g.queries == 1 and not g.packed else (0, 1, 2, 3)),
            "inner_precise",
            "query",
        ),
        that(
            "no inner_precise 1 or 3 in float16, whose softmax in half precision is not modelled by porter",
            lambda c: c["query"].dtype != torch.float16 or c["inner_precise"] % 2 == 0,
            "inner_precise",
            "query",
        ),
    )


def _optional(dtype: str, count: int) -> str:
    """Rows of `dtypes` for one tensor and `count` that may be missing; None fits any."""
    return "/".join([dtype] * (count + 1))


def _outputs(names: Names) -> Any:
    def outputs(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = geometry(call, names)
        query = call["query"]
        full = torch.empty(sizes.batch, sizes.heads, sizes.queries, sizes.value_dim, device="meta")
        output = query.new_empty(arranged(full, sizes.output_layout).shape)
        shape = lse_shape(call, sizes) if call[names.softmax_lse] else (0,)
        return output, query.new_empty(shape, dtype=torch.float32)

    return outputs


def lse_shape(call: Call, sizes: Geometry) -> tuple[int, ...]:
    """(T, N, 1) in packed layouts, (B, N, Q, 1) else."""
    if split_layout(call["input_layout"])[0] in PACKED:
        return sizes.queries, sizes.heads, 1
    return sizes.batch, sizes.heads, sizes.queries, 1


def _sink_rules(names: Names) -> tuple[Rule, ...]:
    return (
        on(
            names,
            "learnable_sink bfloat16 [heads], in layouts TND and NTD_TND alone, over values of at most 128",
            lambda c, g: (
                c["learnable_sink"] is None
                or (
                    c["learnable_sink"].dtype == torch.bfloat16
                    and tuple(c["learnable_sink"].shape) == (g.heads,)
                    and c["input_layout"] in ("TND", "NTD_TND")
                    and g.value_dim <= 128
                )
            ),
            "learnable_sink",
            "input_layout",
            "value",
        ),
    )


def _explicit(names: Names) -> tuple[str, ...]:
    return names.heads, names.key_heads, names.scale, "input_layout", "sparse_mode"


OPS = (
    VendorOp(
        name="npu_fused_infer_attention_score",
        schema=FUSED_INFERENCE,
        page=PAGES + "torch_npu-npu_fused_infer_attention_score.md",
        chips=(A2, A3, A5),
        outputs=_outputs(FIRST),
        rules=(
            absent(*FIRST_QUANTIZATION, why="quantize inside the operator: not modelled by porter"),
            absent("query_padding_size", "kv_padding_size", "key_shared_prefix", "value_shared_prefix"),
            *_rules(FIRST),
        ),
        value_rules=value_rules(FIRST),
        explicit=_explicit(FIRST),
        note=NOTE,
    ),
    VendorOp(
        name="npu_fused_infer_attention_score_v2",
        schema=FUSED_INFERENCE_SECOND,
        page=PAGES + "torch_npu-npu_fused_infer_attention_score_v2.md",
        chips=(A2, A3, A5),
        outputs=_outputs(SECOND),
        rules=(
            absent(*SECOND_QUANTIZATION, why="quantize inside the operator: not modelled by porter"),
            absent(*RESERVED, why="are reserved"),
            *(one_of(name, 0) for name in ("query_quant_mode", "key_quant_mode", "value_quant_mode")),
            *_rules(SECOND),
            *_sink_rules(SECOND),
        ),
        value_rules=value_rules(SECOND),
        explicit=_explicit(SECOND),
        note=f"{NOTE}. learnable_sink: a logit of each head among the scores, without a value",
    ),
)
