"""DeepSeek-V3.2: latent attention over the keys that a lightning indexer selects for each query."""

from __future__ import annotations

from porter.models.family import Family, lazily
from porter.models.prediction import DEEPSEEK

FAMILY = Family(
    model_type="deepseek_v32",
    module="transformers.models.deepseek_v32.modeling_deepseek_v32",
    class_name="DeepseekV32ForCausalLM",
    expected=("rms_norm", "gated_mlp", "indexer", "sparse_mla_attention", "router", "experts", "decoder_layer"),
    special=(
        "an indexer with a key cache of its own selects index_topk keys for each query; only their latents are read",
        "the indexer's rope turns halves, the attention's neighbours; its score weights stay in float32 beside float16",
        "up to index_topk tokens every key is selected, and attention is DeepSeek-V3's",
        "router in float32; the correction bias chooses but does not weigh",
        "the multi-token prediction layer, with an indexer of its own, is ported beside the model",
    ),
    prediction=DEEPSEEK,
)

__getattr__ = lazily(FAMILY, globals())
