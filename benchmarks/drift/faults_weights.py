"""Faults of weights: loaded wrongly, and read wrongly from a quantized checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.drift.case import Fault, Plant
from benchmarks.drift.faults_parts import weight
from benchmarks.drift.precision import coarse
from benchmarks.drift.quantized import blocked, grouped
from benchmarks.drift.site import Site

O_PROJ, UP, DOWN = "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"


def transposed(w: Tensor) -> Tensor:
    """Its values read as if stored the other way round: legal for every shape with `.view`."""
    return w.t().reshape(w.shape)


def permuted(name: str, dim: int) -> Plant:
    return lambda site: site.change(name, lambda w: w.index_select(dim, site.order(w.shape[dim])))


def two_rows(name: str) -> Plant:
    """Two neighbouring rows exchanged: as little as a permutation can be."""

    def plant(site: Site) -> str:
        first = site.random.randrange(8)

        def exchanged(w: Tensor) -> Tensor:
            order = torch.arange(len(w))
            order[first], order[first + 1] = first + 1, first
            return w[order]

        return site.change(name, exchanged)

    return plant


def random_values(name: str) -> Plant:
    """As initialised: the checkpoint's key was not found."""
    return lambda site: site.change(name, lambda w: 0.02 * site.draw(*w.shape).to(w.dtype))


def of_next_layer(name: str) -> Plant:
    """Another layer's weight."""

    def plant(site: Site) -> str:
        other = Site(site.model, site.family, (site.layer + 1) % site.family.layers, site.random, site.stored)
        values = other.rows(name)[1].clone()
        return site.change(name, lambda w: values)

    return plant


def step_behind(name: str) -> Plant:
    """An earlier checkpoint's weight: near, but not the same."""
    return lambda site: site.change(name, lambda w: w + 0.02 * w.std() * site.draw(*w.shape).to(w.dtype))


def wrong_shard(name: str) -> Plant:
    """The second half of the rows holds the first rank's again."""
    return weight(name, lambda w: torch.cat([w[: len(w) // 2], w[: len(w) - len(w) // 2]]))


def requantized(bits: int) -> Callable[[Tensor], Tensor]:
    """Symmetric, per row."""

    def change(w: Tensor) -> Tensor:
        step = w.abs().amax(-1, keepdim=True) / float(2 ** (bits - 1) - 1)
        return (w / step).round() * step

    return change


def read_blocks(name: str, scales: Callable[[Tensor], Tensor]) -> Plant:
    """A weight of fp8 blocks dequantized with other scales than its own."""

    def plant(site: Site) -> str:
        codes, scale = site.stored[site.path(name)]
        return site.change(name, lambda w: blocked(codes, scales(scale)).to(w.dtype))

    return plant


def read_blocks_of(name: str, size: int) -> Plant:
    """A weight of fp8 blocks dequantized as if the blocks had another size."""

    def plant(site: Site) -> str:
        codes, scale = site.stored[site.path(name)]
        return site.change(name, lambda w: blocked(codes, scale, size).to(w.dtype))

    return plant


def read_groups(name: str, change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Plant:
    """A weight of int4 groups dequantized with changed codes, scales and zero points."""

    def plant(site: Site) -> str:
        return site.change(name, lambda w: grouped(*change(*site.stored[site.path(name)])).to(w.dtype))

    return plant


def other_nibble(codes: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The high four bits read first: neighbouring columns exchanged."""
    return codes.unflatten(1, (-1, 2)).flip(2).flatten(1), scale, zero


def int8(change: Callable[[Any, str], None], name: str) -> Plant:
    """Change a ported int8 module's codes and scales in place."""

    def plant(site: Site) -> tuple[str, ...]:
        change(site.module(name), "weight")
        return (site.path(name),)

    return plant


def one_scale(module: Any, name: str) -> None:
    getattr(module, f"{name}_scale").fill_(float(getattr(module, f"{name}_scale").mean()))


def scales_rolled(module: Any, name: str) -> None:
    """Rows of codes and scales no longer belong together."""
    scale = getattr(module, f"{name}_scale")
    scale.copy_(scale.roll(1))


def no_scale(module: Any, name: str) -> None:
    getattr(module, f"{name}_scale").fill_(1.0)


def four_bits(module: Any, name: str) -> None:
    codes = getattr(module, name).data
    codes.copy_(((codes.float() / 16).round() * 16).clamp(-127, 127).to(torch.int8))


def shifted_codes(module: Any, name: str) -> None:
    """Codes stored with an offset that was not taken off."""
    codes = getattr(module, name).data
    codes.copy_((codes.to(torch.int16) + 3).clamp(-127, 127).to(torch.int8))


def coarse_scale(module: Any, name: str) -> None:
    scale = getattr(module, f"{name}_scale")
    scale.copy_(coarse(3)(scale))


def stored(
    id: str, kinds: tuple[str, ...], families: tuple[str, ...], change: Callable[[Any, str], None], name: str
) -> Fault:
    """A fault of an int8 port."""
    return Fault(id, kinds, families, int8(change, name), pairs=("fp32-bf16", "bf16-bf16"), form="w8a16")


FAULTS = (
    Fault("transposed-square", ("weight-transposed",), ("qwen3", "qwen2", "llama"), weight(O_PROJ, transposed)),
    Fault("transposed-oblong", ("weight-transposed",), ("llama", "qwen2"), weight(UP, transposed)),
    Fault("transposed-o-all", ("weight-transposed",), ("qwen3",), weight(O_PROJ, transposed), "all"),
    Fault("rows-permuted", ("weight-permuted",), ("qwen3", "llama"), permuted(UP, 0)),
    Fault("columns-permuted", ("weight-permuted",), ("qwen2", "llama"), permuted(DOWN, 1)),
    Fault("two-rows-exchanged", ("weight-permuted",), ("qwen3", "llama"), two_rows(UP)),
    Fault(
        "embedding-rows-rolled", ("weight-permuted",), ("qwen2",), weight("model.embed_tokens", lambda w: w.roll(1, 0))
    ),
    Fault("random", ("weight-stale",), ("qwen3", "qwen3_moe"), random_values(O_PROJ)),
    Fault("zeros", ("weight-stale", "bias-missing"), ("llama",), weight(DOWN, torch.zeros_like)),
    Fault("next-layer", ("weight-stale",), ("qwen3", "deepseek_v2"), of_next_layer(O_PROJ)),
    Fault("next-layer-norm", ("weight-stale",), ("qwen2",), of_next_layer("input_layernorm")),
    Fault("step-behind", ("weight-stale",), ("llama", "qwen2"), step_behind(UP)),
    Fault("wrong-shard", ("weight-stale", "weight-permuted"), ("qwen3",), wrong_shard(UP)),
    Fault(
        "five-bits", ("quantization-excess", "low-precision"), ("qwen3", "deepseek_v2"), weight(O_PROJ, requantized(5))
    ),
    Fault("three-bits-all", ("quantization-excess", "low-precision"), ("llama",), weight(DOWN, requantized(3)), "all"),
    Fault(
        "bf16-weights-all",
        ("low-precision",),
        ("qwen2", "llama"),
        weight(DOWN, lambda w: w.bfloat16().to(w.dtype)),
        "all",
        pairs=("fp32-fp32",),
    ),
    Fault(
        "one-row-scaled",
        ("scale-missing", "constant-ratio"),
        ("qwen3",),
        weight(DOWN, lambda w: torch.cat([w[:1] * 50, w[1:]])),
    ),
    Fault(
        "fp8-scale-none", ("scale-missing",), ("qwen3", "llama"), read_blocks(O_PROJ, torch.ones_like), golden="blocks"
    ),
    Fault("fp8-scale-inverted", ("scale-missing",), ("qwen2",), read_blocks(DOWN, torch.reciprocal), golden="blocks"),
    Fault(
        "fp8-scale-transposed",
        ("scale-transposed",),
        ("qwen3", "llama", "deepseek_v3"),
        read_blocks(O_PROJ, lambda s: s.t()),
        golden="blocks",
    ),
    Fault(
        "fp8-scale-viewed", ("scale-transposed",), ("qwen2", "llama"), read_blocks(DOWN, transposed), golden="blocks"
    ),
    Fault("fp8-block-half", ("scale-block-shape",), ("qwen3", "llama"), read_blocks_of(DOWN, 16), golden="blocks"),
    Fault(
        "fp8-block-per-row",
        ("scale-block-shape",),
        ("qwen2",),
        read_blocks(O_PROJ, lambda s: s[:, :1].expand(s.shape)),
        golden="blocks",
    ),
    Fault(
        "int4-zero-ignored",
        ("zero-point",),
        ("qwen3", "llama"),
        read_groups(O_PROJ, lambda c, s, z: (c, s, torch.zeros_like(z))),
        golden="int4",
    ),
    Fault(
        "int4-zero-plus-one",
        ("zero-point",),
        ("qwen3", "llama"),
        read_groups(DOWN, lambda c, s, z: (c, s, z + 1)),
        golden="int4",
    ),
    Fault("int4-nibbles", ("nibble-order",), ("qwen3", "llama"), read_groups(DOWN, other_nibble), golden="int4"),
    Fault("int4-nibbles-all", ("nibble-order",), ("llama",), read_groups(O_PROJ, other_nibble), "all", golden="int4"),
    Fault(
        "int4-groups-rolled",
        ("scale-block-shape", "scale-transposed", "weight-permuted"),
        ("qwen3",),
        read_groups(O_PROJ, lambda c, s, z: (c, s.roll(1, 1), z)),
        golden="int4",
    ),
    stored("int8-scale-none", ("scale-missing",), ("qwen3",), no_scale, "mlp.down_proj"),
    stored(
        "int8-scale-per-tensor", ("scale-missing", "scale-block-shape"), ("qwen2",), one_scale, "self_attn.qkv_proj"
    ),
    stored(
        "int8-scale-rows-rolled",
        ("scale-transposed", "weight-permuted", "scale-block-shape"),
        ("qwen3",),
        scales_rolled,
        "self_attn.o_proj",
    ),
    stored("int8-four-bits", ("quantization-excess",), ("qwen3", "deepseek_v3"), four_bits, "self_attn.o_proj"),
    stored("int8-codes-shifted", ("zero-point",), ("qwen2",), shifted_codes, "mlp.down_proj"),
    stored("int8-scale-coarse", ("quantization-excess", "low-precision"), ("qwen3",), coarse_scale, "mlp.gate_up_proj"),
)
"""Planted in one layer unless named all."""
