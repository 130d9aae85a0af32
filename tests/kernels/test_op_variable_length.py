"""Attention within segments: by its definition, against upstream's vision attention, and on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from reference_cases import assert_same, cases, reference
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLVisionAttention,
    Qwen3VLVisionConfig,
    apply_rotary_pos_emb_vision,
)

from porter.kernels.contract import Case, Implementation
from porter.kernels.cpu import variable_length
from porter.kernels.registry import default_registry

KEY = ("attention", "variable_length")


def cpu() -> Implementation:
    provider = default_registry().providers["cpu"]
    found = provider.implementation(*KEY)
    if provider.supported("cpu") is not None or found is None:
        pytest.skip("no CPU kernels here")
    return found


@pytest.mark.parametrize("case", cases(*KEY), ids=lambda case: case.label)
def test_each_token_sees_its_own_segment_by_definition(case: Case) -> None:
    query, key, value, bounds, scaling = case.arguments
    ours = reference(*KEY, query, key, value, bounds, scaling)
    assert ours.is_contiguous()
    n = torch.arange(query.shape[0])
    segment = torch.bucketize(n, bounds[1:], right=True)
    scores = torch.einsum("nhd,mhd->hnm", query, key) * scaling
    scores = scores.masked_fill(segment[:, None] != segment[None, :], -math.inf)
    assert_same(ours, torch.einsum("hnm,mhd->nhd", scores.softmax(-1), value).contiguous())


def test_against_upstreams_vision_attention() -> None:
    config = Qwen3VLVisionConfig(hidden_size=48, num_heads=3)
    config._attn_implementation = "eager"
    module = Qwen3VLVisionAttention(config).double().eval()
    hidden = torch.randn(26, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    angles = torch.randn(26, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).float().double()
    bounds = torch.tensor([0, 8, 20, 26], dtype=torch.int32)
    # Upstream rotates in float32, so queries and keys are rotated by its own function.
    query, key, value = module.qkv(hidden).unflatten(-1, (3, 3, 16)).unbind(1)
    query, key = apply_rotary_pos_emb_vision(query, key, angles.cos(), angles.sin())
    with torch.no_grad():
        wanted = module(hidden, cu_seqlens=bounds, position_embeddings=(angles.cos(), angles.sin()))
        ours = module.proj(reference(*KEY, query, key, value, bounds, module.scaling).flatten(1))
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)  # its softmax is in float32


@pytest.mark.parametrize("bounds", [[0, 3], [1, 6], [0, 4, 2, 6], []])
def test_bounds_that_do_not_cover_the_tokens_are_refused_by_both(bounds: list[int]) -> None:
    states = torch.randn(6, 2, 8)
    for call in (default_registry().op(*KEY).reference, cpu().call):
        with pytest.raises(ValueError, match="must go up from 0 to the 6 tokens"):
            call(states, states, states, torch.tensor(bounds, dtype=torch.int32), 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threshold", [1, 10**9], ids=["torch's attention", "own kernel"])
def test_both_ways_of_the_cpu_kernel_are_within_tolerance(
    dtype: torch.dtype, threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variable_length, "TORCH_FROM_TOKENS", threshold)
    op, kernel = default_registry().op(*KEY), cpu()
    taken = 0
    for case in op.inputs(dtype):
        if kernel.accepts(*case.arguments) is None:
            taken += 1
            error = op.error(kernel.call(*case.arguments), op.oracle(*case.arguments), *case.arguments)
            assert error <= op.tolerance.relative(dtype, *case.arguments), case.label
    assert taken >= 12


def test_no_segment_leaks_into_another() -> None:
    query, key, value = (torch.randn(24, 2, 16) for _ in range(3))
    bounds = torch.tensor([0, 10, 24], dtype=torch.int32)
    for call in (default_registry().op(*KEY).reference, cpu().call):
        before = call(query, key, value, bounds, 0.25)[:10]
        poisoned = torch.cat([value[:10], torch.full_like(value[10:], math.nan)])
        assert torch.equal(call(query, key, poisoned, bounds, 0.25)[:10], before)


def test_what_the_kernel_refuses() -> None:
    states = torch.randn(6, 2, 8)
    bounds = torch.tensor([0, 6], dtype=torch.int32)
    accepts = cpu().accepts
    assert accepts(states, states, states, bounds, 0.5) is None
    assert accepts(states.double(), states.double(), states.double(), bounds, 0.5) is not None
    assert accepts(states, states.bfloat16(), states, bounds, 0.5) is not None
    assert accepts(states.transpose(1, 2), states.transpose(1, 2), states.transpose(1, 2), bounds, 0.5) is not None
    assert accepts(states, states[:5], states[:5], bounds, 0.5) is not None
    assert accepts(states[:0], states[:0], states[:0], bounds[:1], 0.5) is not None
