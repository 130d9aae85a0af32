"""DeepSeek's families at toy width."""

from transformers import DeepseekV2Config, DeepseekV3Config, DeepseekV4Config, DeepseekV32Config

from porter.models.shipped.recipe import VOCABULARY, Recipe

TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")  # noqa: RUF001
"""Begin, end and padding under DeepSeek's own names, with the bars and blanks that its tokenizer spells them with."""


def tiny_deepseek_v2() -> Recipe:
    """DeepSeek-V2 at toy width: MLA with a full-rank query, 16 experts of which the 2 best of 4 groups are used."""
    config = DeepseekV2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=16,
        routed_scaling_factor=4.0,
        kv_lora_rank=64,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        num_experts_per_tok=3,
        first_k_dense_replace=1,
        norm_topk_prob=False,
        max_position_embeddings=2048,
        initializer_range=0.05,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        },
        tie_word_embeddings=False,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    )
    config.update({"scoring_func": "softmax"})
    return Recipe(config, TOKENS, *TOKENS, steps=700, peak_learning_rate=3e-3)


def tiny_deepseek_v3() -> Recipe:
    """DeepSeek-V3 at toy width: MLA, one dense layer, 16 experts in 4 groups, a shared expert, YaRN."""
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=16,
        routed_scaling_factor=2.5,
        kv_lora_rank=64,
        q_lora_rank=96,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        initializer_range=0.05,
        rope_interleave=True,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
        num_mtp_layers=0,
        tie_word_embeddings=False,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    )
    # transformers reads neither, but every released config has both, and engines that serve the model ask for them.
    config.update({"topk_method": "noaux_tc", "scoring_func": "sigmoid"})
    return Recipe(config, TOKENS, *TOKENS, steps=1000, peak_learning_rate=3e-3)


def tiny_deepseek_v32() -> Recipe:
    """DeepSeek-V3.2 at toy width: each query attends to the 32 keys that the layer's indexer selects; YaRN to 8192."""
    config = DeepseekV32Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=12,
        routed_scaling_factor=2.5,
        kv_lora_rank=64,
        q_lora_rank=96,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        index_n_heads=8,
        index_head_dim=32,
        index_topk=32,
        max_position_embeddings=8192,
        initializer_range=0.05,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        tie_word_embeddings=False,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    )
    # As in tiny-deepseek-v3: for engines that serve the model.
    config.update({"topk_method": "noaux_tc", "scoring_func": "sigmoid"})
    return Recipe(config, TOKENS, *TOKENS, steps=700, peak_learning_rate=3e-3)


def tiny_deepseek_v4() -> Recipe:
    """DeepSeek-V4 at toy width: a layer with a window alone, then compressed keys, selected ones and all of them;
    experts by token id, then by score; four residual streams."""
    config = DeepseekV4Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=32,
        partial_rotary_factor=0.5,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=48,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        sliding_window=32,
        index_n_heads=4,
        index_head_dim=24,
        index_topk=16,
        mlp_layer_types=["hash_moe", "moe", "moe"],
        n_routed_experts=8,
        num_experts_per_tok=2,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        hc_mult=4,
        hc_sinkhorn_iters=6,
        num_nextn_predict_layers=0,
        max_position_embeddings=4096,
        initializer_range=0.05,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        tie_word_embeddings=False,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    )
    return Recipe(config, TOKENS, *TOKENS, steps=1300, peak_learning_rate=4e-3, batch=6, length=192)
