"""The configuration of a hand-written model whose fields have other names than transformers' own."""

from transformers import PreTrainedConfig


class LarkConfig(PreTrainedConfig):
    model_type = "lark"
    attribute_map = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
    }

    vocab_size: int = 257
    dim: int = 64
    ffn_dim: int = 96
    n_layers: int = 3
    n_heads: int = 4
    n_kv_heads: int = 2
    head_size: int = 16
    theta: float = 10000.0
    eps: float = 1e-5
    max_position_embeddings: int = 512
    tie_word_embeddings: bool = False
    use_cache: bool = True
