"""What the shipped checkpoints are made of: configurations, tokenizers and how long each trains."""

from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV4Config,
    DeepseekV32Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
)

BYTES = 256
VOCABULARY = 264


@dataclass(frozen=True)
class Recipe:
    """What one checkpoint is made of: its configuration, its special tokens (from id 256 on) and its training."""

    config: PreTrainedConfig
    special_tokens: tuple[str, ...]
    bos_token: str | None
    eos_token: str
    pad_token: str
    steps: int
    peak_learning_rate: float
    batch: int = 8
    length: int = 256

    def shape(self, progress: float) -> tuple[int, int]:
        """Rows and bytes a row at `progress` (0 to 1) of the run: windows twice as long in the last fifth."""
        return (self.batch, self.length) if progress < 0.8 else (self.batch // 2, 2 * self.length)


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
    tokens = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")  # noqa: RUF001
    return Recipe(config, tokens, tokens[0], tokens[1], tokens[2], steps=700, peak_learning_rate=3e-3)


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
    # DeepSeek's own names for these, with the bars and blanks that its tokenizer spells them with.
    tokens = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")  # noqa: RUF001
    return Recipe(config, tokens, tokens[0], tokens[1], tokens[2], steps=1000, peak_learning_rate=3e-3)


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
    tokens = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")  # noqa: RUF001
    return Recipe(config, tokens, tokens[0], tokens[1], tokens[2], steps=700, peak_learning_rate=3e-3)


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
    tokens = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")  # noqa: RUF001
    return Recipe(config, tokens, tokens[0], tokens[1], tokens[2], 1300, peak_learning_rate=4e-3, batch=6, length=192)


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
    tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return Recipe(config, tokens, None, tokens[2], tokens[0], steps=1200, peak_learning_rate=4e-3)


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
        head_dim=32,
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
    tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return Recipe(config, tokens, None, tokens[2], tokens[0], steps=700, peak_learning_rate=4e-3)


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
    tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    return Recipe(config, tokens, None, tokens[2], tokens[0], steps=700, peak_learning_rate=4e-3)


def tiny_qwen3_vl() -> Recipe:
    """Qwen3-VL at toy width: a vision tower of 4 blocks whose features also enter two layers of the text model."""
    tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
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
    return Recipe(config, (*tokens, "<|video_pad|>"), None, tokens[2], tokens[0], steps=2600, peak_learning_rate=3e-3)


RECIPES = {
    "tiny-deepseek-v2": tiny_deepseek_v2,
    "tiny-deepseek-v3": tiny_deepseek_v3,
    "tiny-deepseek-v32": tiny_deepseek_v32,
    "tiny-deepseek-v4": tiny_deepseek_v4,
    "tiny-qwen3": tiny_qwen3,
    "tiny-qwen3-moe": tiny_qwen3_moe,
    "tiny-qwen3-next": tiny_qwen3_next,
    "tiny-qwen3-vl": tiny_qwen3_vl,
}


def byte_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """A tokenizer whose ids 0..255 are the bytes of the UTF-8 text: no merges, no normalisation, nothing unknown."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = iter(range(BYTES, 2 * BYTES))
    # GPT-2's byte alphabet: a printable byte stands for itself, the others are shifted past 255 in order.
    vocabulary = {chr(byte if byte in printable else next(shifted)): byte for byte in range(BYTES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in recipe.special_tokens])
    if recipe.bos_token is not None:
        bos = (recipe.bos_token, tokenizer.token_to_id(recipe.bos_token))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos[0]}:0 $A:0", pair=f"{bos[0]}:0 $A:0 $B:1", special_tokens=[bos]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=recipe.bos_token,
        eos_token=recipe.eos_token,
        pad_token=recipe.pad_token,
        model_max_length=recipe.config.get_text_config().max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
