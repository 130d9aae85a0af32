"""Arguments of vendor calls against what the config says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from porter.ascend_lint.evidence import Evidence
from porter.ascend_lint.finding import LintedFault
from porter.ascend_lint.trace import TracedCall

EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")
EPSILON_ARGUMENTS = ("epsilon", "rmsnorm_epsilon_cq", "rmsnorm_epsilon_ckv")
NORMS = frozenset(("npu_rms_norm", "npu_add_rms_norm", "npu_gemma_rms_norm"))
SCALES = {
    "npu_fused_infer_attention_score": "scale",
    "npu_fused_infer_attention_score_v2": "softmax_scale",
    "npu_fusion_attention": "scale",
    "npu_fusion_attention_v3": "scale",
}
SCALED_BY_HEAD = frozenset(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "deepseek_v3", "deepseek_v32"))
"""Model types whose scale is the head's size ** -0.5, times YaRN's factor squared where rope_parameters has
mscale_all_dim (transformers' modelling code of each)."""
GATING = {
    "k": "num_experts_per_tok",
    "k_group": "topk_group",
    "group_count": "n_group",
    "routed_scaling_factor": "routed_scaling_factor",
}
"""Arguments of npu_moe_gating_top_k and the config's fields of the same meaning."""
SCORES = {"softmax": 0, "sigmoid": 1}
CLOSE = 1e-6


def epsilons(evidence: Evidence) -> Iterator[LintedFault]:
    """The epsilon of each norm: its module's own where that has one, else the config's rms_norm_eps."""
    for traced in evidence.trace.calls:
        own = next((v for n in EPSILON_NAMES if isinstance(v := getattr(traced.module, n, None), float)), None)
        wanted = evidence.config.get("rms_norm_eps") if own is None else own
        for name in EPSILON_ARGUMENTS:
            found = traced.call.arguments.get(name)
            if wanted is not None and found is not None and not math.isclose(found, wanted, rel_tol=CLOSE):
                yield _differs("epsilon", traced, name, wanted, found)


def scales(evidence: Evidence) -> Iterator[LintedFault]:
    """The scale of each attention."""
    wanted = attention_scale(evidence.config)
    for traced in evidence.trace.calls:
        name = SCALES.get(traced.op)
        if wanted is None or name is None:
            continue
        # A bias goes with queries that are scaled already.
        biased = any(traced.call.arguments.get(n) is not None for n in ("pse_shift", "pse"))
        found = traced.call[name]
        if not math.isclose(found, wanted, rel_tol=1e-3) and not (biased and found == 1.0):
            yield _differs("attention-scale", traced, name, wanted, found)


def attention_scale(config: Mapping[str, Any]) -> float | None:
    """The scale that the config's model type has; None for a type that is not known."""
    if config.get("model_type") not in SCALED_BY_HEAD:
        return None
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if "qk_nope_head_dim" in config:
        size = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    rope = config.get("rope_parameters") or {}
    factor, mscale = float(rope.get("factor") or 1.0), rope.get("mscale_all_dim")
    stretched = 0.1 * mscale * math.log(factor) + 1.0 if mscale and factor > 1 else 1.0
    return stretched * stretched / math.sqrt(size)


def gating(evidence: Evidence) -> Iterator[LintedFault]:
    """Arguments of npu_moe_gating_top_k, and the dtype that the router's scores and bias have."""
    for traced in evidence.trace.calls:
        if not traced.op.startswith("npu_moe_gating_top_k"):
            continue
        for name, field in GATING.items():
            found, wanted = traced.call.arguments.get(name), evidence.config.get(field)
            if None not in (found, wanted) and not math.isclose(float(found), float(wanted)):  # type: ignore[arg-type]
                yield _differs("router-argument", traced, name, wanted, found)
        score = SCORES.get(str(evidence.config.get("scoring_func")))
        if score is not None and traced.call.arguments.get("norm_type", score) != score:
            yield _differs("router-argument", traced, "norm_type", score, traced.call["norm_type"])
        dtype = traced.call["x"].dtype
        if dtype != torch.float32:
            remedy = "compute the router's scores in float32: rounded ones change order, and tokens go elsewhere"
            found = str(dtype).removeprefix("torch.")
            yield LintedFault("router-dtype", traced.name, f"x of {traced.op}", "float32", found, remedy, "note")


def norm_weights(evidence: Evidence) -> Iterator[LintedFault]:
    """Weights that are stored less one under plain norms, and plain ones under npu_gemma_rms_norm."""
    for traced in evidence.trace.calls:
        if traced.op not in NORMS:
            continue
        mean = float(traced.call["gamma"].detach().float().mean())
        gemma = traced.op == "npu_gemma_rms_norm"
        if (gemma and mean > 0.8) or (not gemma and abs(mean) < 0.2):
            belongs, other = ("around 0", "npu_rms_norm") if gemma else ("around 1", "npu_gemma_rms_norm")
            remedy = f"{other} is the one for such weights, unless they were trained so"
            what = f"the mean weight of {traced.op}"
            yield LintedFault("norm-zero-centred", traced.name, what, belongs, f"{mean:.3g}", remedy, "note")


def _differs(rule: str, traced: TracedCall, argument: str, wanted: Any, found: Any) -> LintedFault:
    default = next((a.default for a in traced.call.op.signature if a.name == argument), None)
    whose = "the operator's default" if found == default else "not the config's"
    return LintedFault(
        rule,
        traced.name,
        f"{argument} of {traced.op}",
        f"{wanted:g}",
        f"{found:g} ({whose})",
        f"pass {argument}={wanted:g}",
    )
