"""Qwen's families at toy width."""

from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig, Qwen3NextConfig, Qwen3VLConfig

from porter.models.shipped.recipe import VOCABULARY, Recipe

TOKENS = PAD, _, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def tiny_qwen2() -> Recipe:
    """Qwen2 at toy width: grouped-query attention whose query, key and value have biases, tied embeddings."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=256,
    )
    return Recipe(config, TOKENS, None, END, PAD, steps=1200, peak_learning_rate=4e-3)


def tiny_qwen3() -> Recipe:
    """Qwen3 at toy width: grouped-query attention with query and key norms, tied embeddings."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=256,
    )
    return Recipe(config, TOKENS, None, END, PAD, steps=1200, peak_learning_rate=4e-3)


def tiny_qwen3_moe() -> Recipe:
    """Qwen3-MoE at toy width: query and key norms, 16 experts of which 4 are chosen by a renormalised softmax."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # type: ignore[call-arg]  # the model reads it, though the config does not declare it
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=0.001,
        max_position_embeddings=1024,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=256,
    )
    return Recipe(config, TOKENS, None, END, PAD, steps=700, peak_learning_rate=4e-3)


def tiny_qwen3_next() -> Recipe:
    """Qwen3-Next at toy width: three gated delta nets, then gated attention; 8 experts beside a gated shared one."""
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        router_aux_loss_coef=0.001,
        max_position_embeddings=1024,
        initializer_range=0.05,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=256,
    )
    return Recipe(config, TOKENS, None, END, PAD, steps=700, peak_learning_rate=4e-3)


def tiny_qwen3_vl() -> Recipe:
    """Qwen3-VL at toy width: a vision tower of 4 blocks whose features also enter two layers of the text model."""
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 128,
            "intermediate_size": 320,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "initializer_range": 0.05,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": 258,
            "pad_token_id": 256,
        },
        vision_config={
            "depth": 4,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_heads": 4,
            "patch_size": 8,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": 128,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 2],
            "initializer_range": 0.05,
        },
        vision_start_token_id=259,
        vision_end_token_id=260,
        image_token_id=261,
        video_token_id=262,
        tie_word_embeddings=True,
    )
    return Recipe(config, (*TOKENS, *VISION), None, END, PAD, steps=2600, peak_learning_rate=3e-3)
