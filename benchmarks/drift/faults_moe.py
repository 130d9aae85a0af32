"""Faults of routers and experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.drift import layers
from benchmarks.drift.case import Fault, Plant
from benchmarks.drift.layers import Route
from benchmarks.drift.precision import coarse
from benchmarks.drift.site import Function, Site


def routed(**twist: Any) -> Plant:
    return lambda site: layers.router(site, Route(**twist))


def gate_attribute(name: str, value: Callable[[Any], Any]) -> Plant:
    def plant(site: Site) -> str:
        gate = site.module("mlp.gate")
        setattr(gate, name, value(getattr(gate, name)))
        return site.path("mlp.gate")

    return plant


def correction(change: Callable[[Tensor], Tensor]) -> Plant:
    """Other values in e_score_correction_bias."""

    def plant(site: Site) -> str:
        bias = site.module("mlp.gate").e_score_correction_bias
        bias.copy_(change(bias.clone()))
        return site.path("mlp.gate")

    return plant


def stacked(change: Callable[[Tensor], Tensor], *names: str) -> Plant:
    """Other values in the experts' stacked weights."""

    def plant(site: Site) -> tuple[str, ...]:
        for name in names:
            values = getattr(site.module("mlp.experts"), name).data
            values.copy_(change(values.clone()))
        return site.path("mlp.experts"), site.path("mlp")

    return plant


def mixed(function: Function) -> Plant:
    return lambda site: (layers.experts(site, function), site.path("mlp"))


def shifted(hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Global ids taken for local ones: every id one too high, the last has no expert."""
    keep = index + 1 < gate_up.shape[0]
    return layers.mix(hidden, (index + 1).clamp(max=gate_up.shape[0] - 1), weights * keep, gate_up, down)


def first_rank(hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Only the first of two expert-parallel ranks' experts: the sum over ranks is missing."""
    return layers.mix(hidden, index, weights * (index < gate_up.shape[0] // 2), gate_up, down)


def twice(hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Summed over ranks twice."""
    return 2 * layers.mix(hidden, index, weights, gate_up, down)


def gelu(hidden: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return layers.mix(hidden, index, weights, gate_up, down, F.gelu)


def unweighted_kernel(site: Site) -> str:
    """A kernel that renormalises the routing weights itself; its reference does not."""

    def kernel(reference: Function, hidden: Tensor, index: Tensor, weights: Tensor, *rest: Any) -> Tensor:
        return layers.mix(hidden, index, weights / weights.sum(-1, keepdim=True), *rest)

    return site.kernel("mlp.experts", "experts", kernel)


def swapped_rows(values: Tensor) -> Tensor:
    return values.roll(values.shape[1] // 2, 1)


def two_exchanged(values: Tensor) -> Tensor:
    order = torch.arange(len(values))
    order[0], order[1] = 1, 0
    return values[order]


def one_forgotten(values: Tensor) -> Tensor:
    """One expert never loaded."""
    values[2] = 0
    return values


SHARED = {"qwen2_moe": "shared_expert", "qwen3_next": "shared_expert"}


def shared(change: Callable[[Tensor], Tensor]) -> Plant:
    """What the shared expert adds, changed on its way."""

    def plant(site: Site) -> tuple[str, ...]:
        name = f"mlp.{SHARED.get(site.family.name, 'shared_experts')}"
        return site.output(name, change), site.path("mlp")

    return plant


def shared_ungated(site: Site) -> tuple[str, ...]:
    """The shared expert added without its sigmoid gate."""

    def forward(self: Any, original: Function, hidden: Tensor) -> Tensor:
        flat = hidden.view(-1, hidden.shape[-1])
        _, weights, index = self.gate(flat)
        mixed: Tensor = self.experts(flat, index, weights) + self.shared_expert(flat)
        return mixed.view_as(hidden)

    return (site.forward("mlp", forward),)


SOFTMAX = ("qwen3_moe", "qwen2_moe", "qwen3_next")
FAULTS = tuple(
    dataclasses.replace(fault, layers="sparse")
    for fault in (
        Fault("router-bias-leaks", ("router-bias",), ("deepseek_v3",), routed(bias_weighs=True)),
        Fault("router-bias-leaks-all", ("router-bias",), ("deepseek_v3",), routed(bias_weighs=True), scope="all"),
        Fault("router-bias-ignored", ("router-bias",), ("deepseek_v3",), routed(bias_selects=False)),
        Fault("router-bias-zero", ("router-bias", "bias-missing"), ("deepseek_v3",), correction(torch.zeros_like)),
        Fault(
            "router-bias-coarse",
            ("router-bias", "router-dtype", "low-precision"),
            ("deepseek_v3",),
            correction(coarse(1)),
            pairs=("fp32-fp32",),
        ),
        Fault(
            "router-not-renormalised",
            ("router-renormalisation",),
            ("deepseek_v3", "qwen3_moe", "qwen3_next"),
            routed(renormalise=False),
        ),
        Fault("router-renormalised", ("router-renormalisation",), ("qwen2_moe",), routed(renormalise=True)),
        Fault(
            "router-renormalised-all",
            ("router-renormalisation",),
            ("qwen2_moe",),
            routed(renormalise=True),
            scope="all",
        ),
        Fault("router-groups-max", ("router-groups",), ("deepseek_v3",), routed(group_score="max")),
        Fault("router-groups-none", ("router-groups",), ("deepseek_v3",), routed(groups=1, chosen_groups=1)),
        Fault("router-groups-one", ("router-groups",), ("deepseek_v3",), routed(chosen_groups=1)),
        Fault(
            "router-groups-greedy",
            ("router-groups",),
            ("deepseek_v2",),
            gate_attribute("topk_method", lambda method: "greedy"),
        ),
        Fault("router-bf16", ("router-dtype", "low-precision"), ("deepseek_v3",), routed(dtype=torch.bfloat16)),
        Fault(
            "router-bf16-all",
            ("router-dtype", "low-precision"),
            ("deepseek_v3",),
            routed(dtype=torch.bfloat16),
            scope="all",
        ),
        Fault(
            "router-bf16-fp32",
            ("router-dtype", "low-precision"),
            SOFTMAX[:2],
            routed(dtype=torch.bfloat16),
            pairs=("fp32-fp32",),
        ),
        Fault("router-scale-none", ("router-scale",), ("deepseek_v3",), routed(scale=1.0)),
        Fault(
            "router-scale-none-v2",
            ("router-scale",),
            ("deepseek_v2",),
            gate_attribute("routed_scaling_factor", lambda s: 1.0),
        ),
        Fault(
            "router-scale-twice",
            ("router-scale",),
            ("deepseek_v2",),
            gate_attribute("routed_scaling_factor", lambda s: s * s),
            scope="all",
        ),
        Fault("router-scale-stray", ("router-scale", "constant-ratio"), ("qwen3_moe",), routed(scale=2.5)),
        Fault("router-top-k", ("unknown",), ("qwen3_moe",), gate_attribute("top_k", lambda k: k - 1)),
        Fault(
            "router-rows-rolled",
            ("expert-permutation", "weight-permuted"),
            ("qwen3_moe", "deepseek_v2"),
            lambda site: site.change("mlp.gate", lambda w: w.roll(1, 0)),
        ),
        Fault(
            "experts-rolled",
            ("expert-permutation",),
            ("deepseek_v3", "qwen3_moe"),
            stacked(lambda w: w.roll(1, 0), "gate_up_proj", "down_proj"),
        ),
        Fault(
            "experts-down-rolled", ("expert-permutation",), ("qwen2_moe",), stacked(lambda w: w.roll(1, 0), "down_proj")
        ),
        Fault(
            "experts-two-exchanged", ("expert-permutation",), ("deepseek_v2",), stacked(two_exchanged, "gate_up_proj")
        ),
        Fault("experts-one-forgotten", ("weight-stale",), ("qwen3_moe",), stacked(one_forgotten, "down_proj")),
        Fault(
            "experts-gate-up",
            ("gate-up-swapped",),
            ("deepseek_v3", "qwen3_next"),
            stacked(swapped_rows, "gate_up_proj"),
        ),
        Fault("experts-gelu", ("activation",), ("deepseek_v3", "qwen2_moe"), mixed(gelu)),
        Fault("experts-id-offset", ("expert-count-offset",), ("deepseek_v3", "qwen3_moe"), mixed(shifted)),
        Fault("experts-id-offset-all", ("expert-count-offset",), ("qwen2_moe",), mixed(shifted), scope="all"),
        Fault("experts-first-rank", ("reduction-missing",), ("deepseek_v3", "qwen3_moe"), mixed(first_rank)),
        Fault("experts-summed-twice", ("reduction-doubled", "constant-ratio"), ("qwen3_moe",), mixed(twice)),
        Fault(
            "experts-kernel-renormalises",
            ("router-renormalisation", "router-scale", "constant-ratio"),
            ("deepseek_v3",),
            unweighted_kernel,
        ),
        Fault("shared-none", ("shared-expert",), ("deepseek_v3", "qwen2_moe"), shared(torch.zeros_like)),
        Fault("shared-none-all", ("shared-expert",), ("deepseek_v2",), shared(torch.zeros_like), scope="all"),
        Fault(
            "shared-twice",
            ("shared-expert", "constant-ratio", "reduction-doubled"),
            ("deepseek_v3", "qwen3_next"),
            shared(lambda x: 2 * x),
        ),
        Fault("shared-ungated", ("shared-expert",), ("qwen2_moe", "qwen3_next"), shared_ungated),
    )
)
"""Planted in one layer unless named all."""
