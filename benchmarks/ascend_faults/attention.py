"""Faults in attention: plain, latent, sparse and linear."""

from __future__ import annotations

from benchmarks.ascend_faults.fault import Fault, Found, Linted, Refused, kernel, modeling
from benchmarks.ascend_faults.norms_and_activations import FIRST, NEXT, QWEN3, V3, V32

ATTENTION = r"layers\.0\.self_attn$"
PREFILL = 'scale=scaling,\n        input_layout="BNSD_BSND",'
STATES = "states = _first(state, (batch, heads, key.shape[3], size), value)"
OUTPUTS = "    outputs = torch.empty_like(values)\n    for token"

FAULTS = (
    Fault(
        "scale-left-out",
        "the attention operators' scale is 1.0 unless it is given",
        QWEN3,
        (kernel("attention_calls", PREFILL, 'input_layout="BNSD_BSND",'),),
        Refused(("npu_fused_infer_attention_score", "scale", "left out")),
    ),
    Fault(
        "scale-of-one",
        "the default scale of 1.0",
        QWEN3,
        (kernel("attention_calls", PREFILL, PREFILL.replace("=scaling", "=1.0")),),
        Found(ATTENTION, ("attention-scale",)),
        FIRST,
    ),
    Fault(
        "yarn-scale-left-out",
        "YaRN's factor squared belongs into the scale",
        V3,
        (
            modeling(
                "yarn_apply_mscale(config.rope_parameters, self.qk_head_dim ** (-0.5))", "self.qk_head_dim ** (-0.5)"
            ),
        ),
        Found(ATTENTION, ("attention-scale",)),
        FIRST,
    ),
    Fault(
        "mask-polarity",
        "True is masked out, the opposite of torch",
        QWEN3,
        (kernel("attention_masks", ".triu(1)", ".tril(0)"),),
        Refused(("npu_fused_infer_attention_score", "atten_mask", "masked out")),
    ),
    Fault(
        "compressed-mask-missing",
        "sparse_mode 3 reads a compressed mask [2048, 2048]",
        QWEN3,
        (kernel("attention_calls", '"atten_mask": compressed_mask(attention.query.device)', '"atten_mask": None'),),
        Refused(("npu_fused_infer_attention_score", "atten_mask")),
    ),
    Fault(
        "every-key-seen",
        "sparse_mode 0 without a mask hides nothing",
        QWEN3,
        (
            kernel("attention_calls", '"atten_mask": compressed_mask(attention.query.device)', '"atten_mask": None'),
            kernel("attention_calls", 'limits = {"sparse_mode": 3,', 'limits = {"sparse_mode": 0,'),
        ),
        Found(ATTENTION, ("attention-mask",)),
        FIRST,
    ),
    Fault(
        "mask-of-keys-alone",
        "a mask [1, 1, 1, S] under sparse_mode 0 (vllm-ascend #15503)",
        QWEN3,
        (
            kernel(
                "attention_calls",
                '"atten_mask": compressed_mask(attention.query.device)',
                '"atten_mask": torch.zeros(1, 1, 1, attention.key.shape[2], dtype=torch.bool)',
            ),
            kernel("attention_calls", 'limits = {"sparse_mode": 3,', 'limits = {"sparse_mode": 0,'),
        ),
        Refused(("npu_fused_infer_attention_score", "atten_mask")),
    ),
    Fault(
        "window-off-by-one",
        "next_tokens counts the keys after the query's own",
        QWEN3,
        (
            kernel(
                "attention_calls",
                '{"sparse_mode": 3, "pre_tokens": UNLIMITED, "next_tokens": UNLIMITED}',
                '{"sparse_mode": 4, "pre_tokens": UNLIMITED, "next_tokens": 1}',
            ),
        ),
        Found(ATTENTION, ("attention-mask",)),
        FIRST,
    ),
    Fault(
        "key-heads-default",
        "num_key_value_heads is 0 unless given, which stands for as many as queries",
        QWEN3,
        (
            kernel(
                "attention_calls",
                "num_key_value_heads=key.shape[1],\n        " + PREFILL,
                "num_key_value_heads=0,\n        " + PREFILL,
            ),
        ),
        Refused(("npu_fused_infer_attention_score", "num_key_value_heads")),
    ),
    Fault(
        "key-heads-tiled",
        "query heads of one key head stand together: keys are repeated, not tiled",
        QWEN3,
        (
            kernel(
                "attention_calls",
                "query, key, value = _padded(attention)\n    mask, scaling, extra",
                "query, key, value = _padded(attention)\n"
                "    key, value = (t.repeat(1, query.shape[1] // t.shape[1], 1, 1) for t in (key, value))\n"
                "    mask, scaling, extra",
            ),
        ),
        Found(ATTENTION, ("kv-head-order",)),
        FIRST,
    ),
    Fault(
        "layout-of-tokens-first",
        "input_layout BSND for tensors in BNSD",
        QWEN3,
        (kernel("attention_calls", 'input_layout="BNSD_BSND"', 'input_layout="BSND"'),),
        Refused(("npu_fused_infer_attention_score", "num_heads")),
    ),
    Fault(
        "layout-unknown",
        "input_layout is a string that the vendor's own shape inference does not read",
        QWEN3,
        (kernel("attention_calls", 'input_layout="BNSD_BSND"', 'input_layout="BNDS"'),),
        Refused(("npu_fused_infer_attention_score", "input_layout")),
    ),
    Fault(
        "latents-of-keys-for-values",
        "kv_b_proj's rows of a head: keys first, then values",
        V3,
        (
            kernel(
                "mla_attention",
                "keys, values = both[..., :nope], both[..., nope:]",
                "keys, values = both[..., value_dim:], both[..., :value_dim]",
            ),
        ),
        Found(ATTENTION, ("weight-permuted",)),
        FIRST,
    ),
    Fault(
        "absorbed-weight-not-transposed",
        "npu_transpose_batchmatmul takes [heads, K, N]",
        V3,
        (kernel("mla_attention", "attended, per_head[:, nope:].transpose(1, 2))", "attended, per_head[:, nope:])"),),
        Refused(("npu_transpose_batchmatmul",)),
    ),
    Fault(
        "attention-mode-default",
        "npu_sparse_flash_attention takes attention_mode 2 alone, and its default is 0",
        V32,
        (kernel("sparse_attention", "attention_mode=2", "attention_mode=0"),),
        Refused(("npu_sparse_flash_attention", "attention_mode")),
    ),
    Fault(
        "attention-mode-left-out",
        "the same, left out",
        V32,
        (kernel("sparse_attention", "        attention_mode=2,\n", ""),),
        Refused(("npu_sparse_flash_attention", "attention_mode")),
    ),
    Fault(
        "invalid-indices-first",
        "the chip stops at the first -1 of a row",
        V32,
        (
            kernel(
                "sparse_attention",
                "indices.masked_fill(hidden, keys).float().sort(dim=-1).values",
                "indices.masked_fill(hidden, keys).float().sort(dim=-1, descending=True).values",
            ),
        ),
        Refused(("npu_sparse_flash_attention", "sparse_indices")),
    ),
    Fault(
        "indexer-sees-all",
        "npu_lightning_indexer's sparse_mode 3 is the causal one",
        V32,
        (
            kernel(
                "sparse_attention",
                "sparse_count=taken,\n        sparse_mode=3",
                "sparse_count=taken,\n        sparse_mode=0",
            ),
        ),
        Linted("mask-missing"),
    ),
    Fault(
        "state-transposed",
        "the vendor's states are [value, key], FLA's [key, value]",
        NEXT,
        (
            kernel(
                "delta_net",
                STATES + "\n" + OUTPUTS,
                STATES + ".transpose(2, 3).contiguous()\n" + OUTPUTS,
            ),
        ),
        Found(r"layers\.\d\.linear_attn$", ("state-reset",)),
        r"layers\.\d\.linear_attn$",
    ),
)
