"""Differences that are no fault: what another chip, dtype, kernel, batch or scheme may do to the numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.drift import layers
from benchmarks.drift.case import Case
from benchmarks.drift.families import FAMILIES, Family
from benchmarks.drift.layers import Attend
from benchmarks.drift.site import Function, Site


def _sites(site: Site) -> Iterator[Site]:
    for layer in range(site.family.layers):
        yield Site(site.model, site.family, layer, site.random, site.stored)


def _linears(site: Site, function: Function) -> None:
    """Every linear layer's product by `function(x, weight)`, then its bias."""
    for name, module in list(site.model.named_modules()):
        weight = getattr(module, "weight", None)
        linear = isinstance(module, nn.Linear) or type(module).__name__ == "Linear"
        if not linear or not isinstance(weight, Tensor) or weight.dtype == torch.int8:
            continue

        def forward(self: Any, original: Function, x: Tensor) -> Tensor:
            product: Tensor = function(x, self.weight)
            bias = getattr(self, "bias", None)
            return (product if bias is None else product + layers.wide(bias)).to(x.dtype)

        site.forward(name if name.startswith(("model.", "lm_head")) else f"model.{name}", forward)


def _chunked(x: Tensor, weight: Tensor, chunk: int = 16) -> Tensor:
    """Accumulated in float32, a chunk of columns at a time: another chip's matrix unit."""
    total = 0.0 * layers.wide(x[..., :1])
    for given, part in zip(x.split(chunk, -1), weight.split(chunk, -1), strict=True):
        total = total + F.linear(layers.wide(given), layers.wide(part))
    return total


def _reversed(x: Tensor, weight: Tensor) -> Tensor:
    """The columns in the opposite order."""
    return F.linear(x.flip(-1), weight.flip(-1))


def other_chip(site: Site) -> tuple[str, ...]:
    """Chunked float32 accumulation in every product, norms that round once."""
    _linears(site, _chunked)
    for name, module in list(site.model.named_modules()):
        if type(module).__name__.endswith("RMSNorm"):
            layers.norm(site, name, layers.rms)
    return ()


def other_order(site: Site) -> tuple[str, ...]:
    """Every product's columns summed in the opposite order."""
    _linears(site, _reversed)
    return ()


def flash(site: Site) -> tuple[str, ...]:
    """Attention with its softmax in blocks of 7 keys, rescaled as they come."""

    def online(scores: Tensor) -> Tensor:
        highest = scores[..., :7].amax(-1, keepdim=True).clamp(min=-1e30)
        total = torch.zeros_like(highest)
        for block in scores.split(7, -1):
            above = torch.maximum(highest, block.amax(-1, keepdim=True))
            total = total * (highest - above).exp() + (block - above).exp().sum(-1, keepdim=True)
            highest = above
        return (scores - highest).exp() / total

    for each in _sites(site):
        if hasattr(site.model.model.layers[each.layer], "self_attn"):
            layers.attention(each, Attend(normalise=online))
    return ()


def float32_experts(site: Site) -> tuple[str, ...]:
    """Experts one after another, summed in float32 and rounded once."""
    for each in _sites(site):
        if each.layer in site.family.sparse:
            layers.experts(each, layers.mix)
    return ()


def nothing(site: Site) -> tuple[str, ...]:
    """The same model."""
    return ()


ATTENDING = tuple(name for name in FAMILIES if name not in ("deepseek_v2",))


def cases(seed: int) -> Iterator[Case]:
    """Every legitimate difference."""

    def case(kind: str, family: Family, pair: str, **more: Any) -> Case:
        return Case(f"legit-{kind}-{pair}/{family.name}", seed, family, pair, plant=more.pop("plant", nothing), **more)

    for family in FAMILIES.values():
        for pair in ("fp32-fp32", "bf16-bf16", "fp32-bf16"):
            yield case("same", family, pair)
        yield case("other-chip", family, "bf16-bf16", plant=other_chip)
    for name in ("qwen3", "qwen3_moe", "deepseek_v3", "qwen2"):
        yield case("half", FAMILIES[name], "fp32-fp16")
        yield case("other-chip", FAMILIES[name], "fp32-fp32", plant=other_chip)
        yield case("order", FAMILIES[name], "bf16-bf16", plant=other_order)
        yield case("long", FAMILIES[name], "fp32-bf16", golden="long")
    for name in ("qwen3", "llama", "qwen3_moe"):
        yield case("flash", FAMILIES[name], "fp32-bf16", plant=flash)
        yield case("widened", FAMILIES[name], "bf16-fp32")
        yield case("padded", FAMILIES[name], "fp32-bf16", golden="padded")
    for name in ("qwen2", "llama", "qwen3_moe", "qwen3_next"):
        yield case("sdpa", FAMILIES[name], "bf16-bf16", attention="sdpa", form="upstream")
    for name in ("qwen3_moe", "qwen2_moe", "deepseek_v2"):
        yield case("grouped-experts", FAMILIES[name], "bf16-bf16", experts="grouped_mm", form="upstream")
        yield case("batched-experts", FAMILIES[name], "fp32-fp32", experts="batched_mm", form="upstream")
        yield case("float32-experts", FAMILIES[name], "fp32-bf16", plant=float32_experts)
    for name in ("qwen2", "qwen3", "deepseek_v3"):
        for scheme in ("w8a16", "w8a8"):
            yield case(scheme, FAMILIES[name], "fp32-bf16", form=scheme)
        yield case("upstream", FAMILIES[name], "bf16-bf16", form="upstream")
        yield case("blocks", FAMILIES[name], "bf16-bf16", golden="blocks")
    for name in ("qwen3", "llama"):
        yield case("threads", FAMILIES[name], "fp32-fp32", recorded="threads", form="upstream")
        yield case("batch", FAMILIES[name], "fp32-fp32", recorded="batch", form="upstream")
        yield case("recorded", FAMILIES[name], "bf16-bf16", recorded="sdpa", attention="sdpa", form="upstream")
