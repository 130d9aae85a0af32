"""Qwen3-Next: three layers of gated delta nets to one of gated attention, experts and a gated shared expert."""

from __future__ import annotations

from porter.models.family import Family, lazily
from porter.models.prediction import QWEN

FAMILY = Family(
    model_type="qwen3_next",
    module="transformers.models.qwen3_next.modeling_qwen3_next",
    class_name="Qwen3NextForCausalLM",
    expected=(
        "rms_norm",
        "gated_rms_norm",
        "gated_mlp",
        "gated_delta_net",
        "gated_attention",
        "router",
        "experts",
        "shared_expert",
        "hybrid_layer",
    ),
    special=(
        "gated delta nets: a causal convolution, then a rule, chunked to prefill, recurrent to decode; float32 states",
        "attention with an output gate, zero-centred q and k norms and partial rope in every fourth layer",
        "in_proj_qkvz and in_proj_ba hold queries, keys, values and gates key head by key head",
        "experts beside a shared expert with a gate of its own",
        "the multi-token prediction layer, of gated attention and experts, is ported beside the model",
    ),
    prediction=QWEN,
)

__getattr__ = lazily(FAMILY, globals())
