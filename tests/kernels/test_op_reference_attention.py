"""The attention references against transformers' eager attention, in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from reference_cases import additive, assert_same, cases, reference
from torch import nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from porter.kernels.reference import attention
from porter.kernels.reference.attention import causal_mask
from porter.precision import float64_mode


def test_gqa_is_eager_attention() -> None:
    compared = 0
    for case in cases("attention", "gqa"):
        query, key, value, mask, scaling, window = case.arguments
        if mask is None:
            mask = causal_mask(query.shape[2], key.shape[2], window, query.device)
        mask = additive(mask) if mask.dtype == torch.bool else mask
        module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], training=False)
        with float64_mode():
            theirs, _ = qwen3.eager_attention_forward(module, query, key, value, mask, scaling)
        ours = reference("attention", "gqa", *case.arguments)
        alive = torch.isfinite(theirs)
        assert (ours[~alive] == 0).all()
        assert_same(ours[alive], theirs[alive])
        assert ours.is_contiguous()
        compared += 1
    assert compared > 25


@pytest.mark.parametrize(
    ("name", "variant"), [("attention", "gqa"), ("mla_attention", "absorbed"), ("mla_attention", "expanded")]
)
def test_attention_in_blocks_of_queries_is_the_same(name: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [reference(name, variant, *case.arguments) for case in cases(name, variant)]
    monkeypatch.setattr(attention, "SCORES", 100)
    for case, expected in zip(cases(name, variant), whole, strict=True):
        ours = reference(name, variant, *case.arguments)
        assert ours.is_contiguous()
        assert_same(ours, expected)


@pytest.mark.parametrize(("queries", "keys", "window"), [(1, 1, None), (3, 7, None), (5, 5, 2), (1, 9, 4), (2, 3, 50)])
def test_causal_mask_by_its_definition(queries: int, keys: int, window: int | None) -> None:
    mask = causal_mask(queries, keys, window, torch.device("cpu"))
    for i in range(queries):
        for j in range(keys):
            last = keys - queries + i
            assert bool(mask[i, j]) == (j <= last and (window is None or j > last - window))


@pytest.mark.parametrize("variant", ["absorbed", "expanded"])
def test_mla_is_deepseeks_expansion_and_eager_attention(variant: str) -> None:
    for case in cases("mla_attention", variant):
        query_nope, query_rope, latent, key_rope, weight, mask, scaling = case.arguments
        if not latent.shape[0]:
            continue  # upstream cannot expand an empty batch
        heads, nope = query_nope.shape[1], query_nope.shape[-1]
        linear = nn.Linear(*reversed(weight.shape), bias=False)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        module = SimpleNamespace(
            qk_nope_head_dim=nope,
            v_head_dim=weight.shape[0] // heads - nope,
            qk_rope_head_dim=query_rope.shape[-1],
            kv_b_proj=linear,
            num_key_value_groups=1,
            training=False,
        )
        key, value = deepseek.DeepseekV3Attention.expand_kv(module, latent, key_rope)  # type: ignore[arg-type]
        query = torch.cat((query_nope, query_rope), dim=-1)
        if mask is None:
            mask = causal_mask(query.shape[2], key.shape[2], None, query.device)
        mask = additive(mask) if mask.dtype == torch.bool else mask
        with float64_mode():
            theirs, _ = deepseek.eager_attention_forward(module, query, key, value, mask, scaling)  # type: ignore[arg-type]
        ours = reference("mla_attention", variant, *case.arguments)
        assert ours.is_contiguous()
        alive = torch.isfinite(theirs)
        assert (ours[~alive] == 0).all()
        assert_same(ours[alive], theirs[alive])
