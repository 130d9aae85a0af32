"""Qwen2 and Qwen2.5: grouped-query attention with biased q, k and v, half rope, silu MLP."""

from __future__ import annotations

from typing import Any

from porter.models.family import Family, importable

FAMILY = Family(
    model_type="qwen2",
    module="transformers.models.qwen2.modeling_qwen2",
    class_name="Qwen2ForCausalLM",
    expected=("rms_norm", "gated_mlp", "attention", "decoder_layer"),
    special=(
        "q, k and v have biases",
        "optional sliding window from max_window_layers on",
    ),
)


def __getattr__(name: str) -> Any:
    """Qwen2ForCausalLM, generated and proven when it is first asked for."""
    if name != FAMILY.class_name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = importable(FAMILY)
    return globals()[name]
