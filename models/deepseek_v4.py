"""DeepSeek-V4: a sliding window beside compressed keys, experts by token id and by score, several residual streams."""

from __future__ import annotations

from porter.models.family import Family, lazily

FAMILY = Family(
    model_type="deepseek_v4",
    module="transformers.models.deepseek_v4.modeling_deepseek_v4",
    class_name="DeepseekV4ForCausalLM",
    expected=(
        "rms_norm",
        "unweighted_rms_norm",
        "gated_mlp",
        "experts",
        "router",
        "grouped_linear",
        "shared_kv_attention",
        "hyper_connection",
        "hyper_layer",
    ),
    special=(
        "one key head that is its own value; the output is turned back at the query's position; a sink per head",
        "beside a sliding window, layers attend to compressed keys: all of them, or index_topk that an indexer selects",
        "one decode step reads only the selected compressed keys; several tokens at once read all under a mask",
        "the cache is transformers' own: windows, tokens that wait for their window to close, and compressed keys",
        "gate and up are clamped at swiglu_limit, in the shared expert too",
        "the first layers route by a table of token ids; the others by sqrt(softplus), the bias choosing alone",
        "norms, sinks, position biases, hyper-connections and the routing bias stay in float32",
        "under int8, keys and gates of compressors, index weights and the grouped output projection stay as they are",
        "multi-token prediction layers are not ported, as transformers does not build them",
    ),
)

__getattr__ = lazily(FAMILY, globals())
