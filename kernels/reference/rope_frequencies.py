"""Inverse frequencies of rotary embeddings, as transformers' `ROPE_INIT_FUNCTIONS` computes them.

All in float32 (float64 oracle apart), rounding as upstream does, so that a float32 result is equal bit for bit.
`head_dim` is the number of dimensions that turn: times `partial_rotary_factor` where a model has one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance

TOLERANCE = Tolerance(
    "a power whose exponent has one roundoff, which log(theta) < 17 multiplies, a division and a blend of two",
    terms=lambda *arguments: 1024,
)

Frequencies = tuple[torch.Tensor, float]


def rope_frequencies_default(head_dim: int, theta: float, *, dtype: torch.dtype = torch.float32) -> Frequencies:
    """(theta^(-2i/head_dim) for i < head_dim/2, attention factor 1)."""
    exponent = torch.arange(0, head_dim, 2, dtype=dtype) / head_dim
    return 1.0 / (theta**exponent), 1.0


def rope_frequencies_linear(
    head_dim: int, theta: float, factor: float, *, dtype: torch.dtype = torch.float32
) -> Frequencies:
    """The default frequencies over `factor`: positions are squeezed (Chen et al. 2023)."""
    inv_freq, _ = rope_frequencies_default(head_dim, theta, dtype=dtype)
    return inv_freq / factor, 1.0


def _magnitude_scale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's 1 / sqrt(t) of equation 22, times DeepSeek's mscale."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """What cos and sin are multiplied by when the config does not say."""
    if mscale and mscale_all_dim:
        return _magnitude_scale(factor, mscale) / _magnitude_scale(factor, mscale_all_dim)
    return _magnitude_scale(factor)


def rope_frequencies_yarn(
    head_dim: int,
    theta: float,
    factor: float,
    original_max_position_embeddings: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
    mscale: float | None,
    mscale_all_dim: float | None,
    attention_factor: float | None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Frequencies:
    """YaRN (Peng et al. 2023, section 3.2): frequencies that turn more than `beta_fast` times within the original
    context stay, those that turn less than `beta_slow` times are divided by `factor`, those between are blended."""

    def dimension(rotations: float) -> float:
        """The dimension whose frequency turns `rotations` times."""
        turns = original_max_position_embeddings / (rotations * 2 * math.pi)
        return (head_dim * math.log(turns)) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=dtype) - low) / width).clamp(0, 1)
    position = theta ** (torch.arange(0, head_dim, 2, dtype=dtype) / head_dim)
    kept = 1 - ramp
    inv_freq = (1.0 / (factor * position)) * (1 - kept) + (1.0 / position) * kept
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor, mscale, mscale_all_dim)
    return inv_freq, attention_factor


def _fake(head_dim: int, *rest: Any) -> torch.Tensor:
    return torch.empty(head_dim // 2, dtype=torch.float32)


def _fake_default(head_dim: int, theta: float) -> Frequencies:
    return _fake(head_dim), 1.0


def _fake_linear(head_dim: int, theta: float, factor: float) -> Frequencies:
    return _fake(head_dim), 1.0


def _fake_yarn(head_dim: int, theta: float, factor: float, *rest: Any) -> Frequencies:
    *_, mscale, mscale_all_dim, attention_factor = rest
    given = attention_factor is not None
    return _fake(head_dim), attention_factor if given else yarn_attention_factor(factor, mscale, mscale_all_dim)


def _cost(head_dim: int, *rest: Any) -> Cost:
    return Cost(4 * (head_dim // 2), 12 * (head_dim // 2))


BASES = ((2, 10000.0), (64, 10000.0), (128, 1000000.0), (34, 500000.0))


def _default_inputs(dtype: torch.dtype) -> Iterator[Case]:
    for base in BASES:
        yield Case(f"{base}", base)


def _linear_inputs(dtype: torch.dtype) -> Iterator[Case]:
    for base in BASES:
        for factor in (1.0, 4.0):
            yield Case(f"{base} factor={factor}", (*base, factor))


def _yarn_inputs(dtype: torch.dtype) -> Iterator[Case]:
    yield Case("DeepSeek-V3", (64, 10000.0, 40.0, 4096, 32.0, 1.0, True, 1.0, 1.0, None))
    yield Case("mscales that differ", (64, 10000.0, 40.0, 4096, 32.0, 1.0, True, 0.707, 1.0, None))
    yield Case("Qwen3", (128, 1000000.0, 4.0, 32768, 32.0, 1.0, True, None, None, None))
    yield Case("not truncated", (128, 150000.0, 32.0, 4096, 32.0, 1.0, False, None, None, None))
    yield Case("attention factor given", (64, 10000.0, 8.0, 2048, 32.0, 1.0, True, None, None, 1.25))
    yield Case("factor below one", (64, 10000.0, 0.5, 2048, 32.0, 1.0, True, None, None, None))


DEFAULT = "(int head_dim, float theta) -> (Tensor, float)"
LINEAR = "(int head_dim, float theta, float factor) -> (Tensor, float)"
YARN = (
    "(int head_dim, float theta, float factor, int original_max_position_embeddings, float beta_fast, "
    "float beta_slow, bool truncate, float? mscale, float? mscale_all_dim, float? attention_factor) -> (Tensor, float)"
)

OPS = tuple(
    Op(
        "rope_frequencies",
        variant,
        schema,
        reference,
        fake,
        inputs,
        TOLERANCE,
        _cost,
        exact=functools.partial(reference, dtype=torch.float64),
        dtypes=(torch.float32,),
    )
    for variant, schema, reference, fake, inputs in (
        ("default", DEFAULT, rope_frequencies_default, _fake_default, _default_inputs),
        ("linear", LINEAR, rope_frequencies_linear, _fake_linear, _linear_inputs),
        ("yarn", YARN, rope_frequencies_yarn, _fake_yarn, _yarn_inputs),
    )
)
