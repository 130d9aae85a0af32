"""Faults planted in whole models: of caches, states, roundings, quantized weights, ranks, padding and randomness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from model_plants import (
    AFTER,
    ATTENTION,
    DOWN,
    EXPERTS,
    GATE,
    LINEAR,
    NORM,
    OUT,
    UP,
    Narrow,
    Plant,
    _float8_cache,
    _one_short,
    _padding_attended,
    at,
    attending,
    dropout,
    experts_of_one_rank,
    norm_in,
    one_rank,
    output_times,
    padded_after,
    racing_channel,
    rescaled,
    rewritten,
    states,
    stored_as,
    twice_as_large,
    unsigned,
    weighing,
    wiped_entries,
    with_zero_points,
)

from porter.alignment.hypotheses.surgery import rebind_globals


@dataclass(frozen=True)
class Fault:
    """`ties` are the kinds that the numbers cannot tell from `kind`; `weights`: the weights pass alone shows it."""

    kind: str
    family: str
    module: str
    plant: Plant
    ties: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    padded: bool = False
    weights: bool = False


def _fault(kind: str, family: str, module: str, change: Plant, *ties: str, **more: Any) -> Fault:
    return Fault(kind, family, module, at(module, change), ties, **more)


FAULTS: dict[str, Fault] = {
    "sigmoids": _fault("attention-not-softmaxed", "qwen2", ATTENTION, weighing(torch.sigmoid)),
    "exponentials": _fault(
        "attention-not-softmaxed", "deepseek_v3", ATTENTION, weighing(lambda x: (x - x.amax(-1, True)).exp())
    ),
    "cache one short": _fault("kv-cache-stale", "qwen3_moe", ATTENTION, attending(_one_short)),
    "cache wiped": _fault("kv-cache-stale", "qwen2", ATTENTION, wiped_entries),
    "cache in float8": _fault("low-precision", "qwen2", ATTENTION, attending(_float8_cache)),
    "norm in bfloat16": _fault("norm-cast-order", "qwen2", NORM, norm_in(torch.bfloat16)),
    "zero-centred norm in bfloat16": _fault("norm-cast-order", "qwen3_next", AFTER, norm_in(torch.bfloat16, 1.0)),
    "norm summed in bfloat16": _fault(
        "norm-cast-order", "qwen2", NORM, norm_in(torch.bfloat16, one_by_one=True), dtype=torch.bfloat16
    ),
    "sigmoid router in bfloat16": _fault(
        "router-dtype", "deepseek_v3", GATE, lambda gate: rebind_globals(gate, {"F": Narrow()})
    ),
    "softmax router in bfloat16": _fault(
        "router-dtype", "qwen3_moe", GATE, lambda gate: rebind_globals(gate, {"F": Narrow()})
    ),
    "router bias in bfloat16": _fault(
        "router-dtype", "deepseek_v3", GATE,
        rewritten(lambda bias: bias.to(torch.bfloat16).to(bias.dtype), "e_score_correction_bias"),
        "low-precision", weights=True,
    ),
    "one rank's columns": _fault("reduction-missing", "qwen2", DOWN, one_rank),
    "one rank's experts": _fault("reduction-missing", "qwen3_moe", EXPERTS, experts_of_one_rank),
    "summed twice": _fault("reduction-doubled", "qwen2", OUT, output_times(2.0)),
    "experts on four ranks": _fault("reduction-doubled", "qwen3_next", EXPERTS, output_times(4.0)),
    "state in bfloat16": _fault("state-dtype", "qwen3_next", LINEAR, stored_as(torch.bfloat16)),
    "state in float16": _fault("state-dtype", "qwen3_next", LINEAR, stored_as(torch.float16)),
    "state lost": _fault(
        "state-reset", "qwen3_next", LINEAR, states(before=lambda layer: layer.recurrent_states[0].zero_())
    ),
    "window lost": _fault(
        "state-reset", "qwen3_next", LINEAR, states(before=lambda layer: layer.conv_states[0].zero_())
    ),
    "convolution padded after": _fault("conv-padding", "qwen3_next", LINEAR, padded_after(3)),
    "convolution one late": _fault("conv-padding", "qwen3_next", LINEAR, padded_after(1)),
    "dropout": _fault("nondeterminism", "qwen2", "model.layers.1.mlp", dropout),
    "a race": _fault("nondeterminism", "qwen3_moe", OUT, racing_channel),
    "padding attended": _fault(
        "padding-rows", "qwen2", ATTENTION, attending(_padding_attended), "attention-mask", padded=True
    ),
    "nibbles exchanged": _fault(
        "nibble-order", "qwen2", UP, rewritten(lambda w: w.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)), weights=True
    ),
    "zero points left out": _fault("zero-point", "qwen2", UP, rewritten(with_zero_points), weights=True),
    "codes read unsigned": _fault("zero-point", "qwen2", DOWN, rewritten(unsigned), weights=True),
    "scales transposed": _fault(
        "scale-transposed", "qwen2", UP, rewritten(rescaled(lambda s: s.t().reshape(s.shape))), weights=True
    ),
    "scales left out": _fault(
        "scale-missing", "qwen2", UP, rewritten(rescaled(lambda s: s.mean().expand_as(s))), weights=True
    ),
    "scales of larger blocks": _fault(
        "scale-block-shape", "qwen2", UP, rewritten(rescaled(twice_as_large)), weights=True
    ),
    "scales tiled": _fault(
        "scale-block-shape", "qwen2", DOWN, rewritten(rescaled(lambda s: s.repeat(8, 8))), weights=True
    ),
    "another model's weight": _fault(
        "weight-stale", "qwen2", UP, rewritten(lambda w: torch.randn_like(w)), weights=True
    ),
    "not renormalised": _fault(
        "router-renormalisation", "qwen3_moe", GATE, lambda gate: setattr(gate, "norm_topk_prob", False)
    ),
    "softmax scores not scaled": _fault(
        "router-scale", "deepseek_v2", GATE, lambda gate: setattr(gate, "routed_scaling_factor", 1.0)
    ),
    "all groups compete": _fault(
        "router-groups", "deepseek_v2", GATE, lambda gate: setattr(gate, "topk_method", "greedy")
    ),
}  # fmt: skip
