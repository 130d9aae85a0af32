"""The recipes of the checkpoints that porter trains and ships, by name."""

from porter.models.shipped import deepseek_recipes, qwen_recipes

RECIPES = {
    "tiny-deepseek-v2": deepseek_recipes.tiny_deepseek_v2,
    "tiny-deepseek-v3": deepseek_recipes.tiny_deepseek_v3,
    "tiny-deepseek-v32": deepseek_recipes.tiny_deepseek_v32,
    "tiny-deepseek-v4": deepseek_recipes.tiny_deepseek_v4,
    "tiny-qwen2": qwen_recipes.tiny_qwen2,
    "tiny-qwen3": qwen_recipes.tiny_qwen3,
    "tiny-qwen3-moe": qwen_recipes.tiny_qwen3_moe,
    "tiny-qwen3-next": qwen_recipes.tiny_qwen3_next,
    "tiny-qwen3-vl": qwen_recipes.tiny_qwen3_vl,
}
