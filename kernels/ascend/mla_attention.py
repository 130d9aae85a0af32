"""Multi-head latent attention by torch_npu: over the latents (absorbed) or over the keys and values expanded from
them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from porter.kernels.ascend.attention import attend
from porter.kernels.ascend.attention_calls import Attention, causal, fusion
from porter.kernels.ascend.attention_masks import whole_cache
from porter.kernels.ascend.attention_packed import packed, rows
from porter.kernels.ascend.catalogue.attention_layouts import LATENT, ROPE
from porter.kernels.ascend.dry_run import Kernel

EXPANDED = (128, 64, 128)
"""The one key, rope and value size whose expanded keys the operator takes beside rope."""


def absorbed(
    torch_npu: Any,
    query_nope: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    kv_b_weight: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """npu_transpose_batchmatmul on either side of the attention over the latents, which are keys and values at once."""
    batch, heads, queries, nope = query_nope.shape
    per_head = kv_b_weight.view(heads, -1, kv_b_weight.shape[-1])
    if query_nope.numel() == 0:
        return query_nope.new_empty(batch, queries, heads, per_head.shape[1] - nope)
    turned = _by_head(torch_npu, query_nope.transpose(1, 2).flatten(0, 1), per_head[:, :nope])
    query = turned.view(batch, queries, heads, -1)
    sizes = latent.shape[-1], key_rope.shape[-1]
    if sizes == (LATENT, ROPE) and attention_mask is None and query.dtype != torch.float32:
        attended = _over_latents(torch_npu, query, query_rope, latent, key_rope, scaling)
    else:
        attended = _over_both(torch_npu, query, query_rope, latent, key_rope, attention_mask, scaling)
    values = _by_head(torch_npu, attended, per_head[:, nope:].transpose(1, 2))
    return values.reshape(batch, queries, heads, -1).contiguous()


def _by_head(torch_npu: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, H, K] times weight [H, K, N] -> [M, H, N]; aten's product where K or N is no multiple of 16."""
    heads, inner, outer = weight.shape
    if inner % 16 or outer % 16:
        return torch.matmul(x.transpose(0, 1), weight).transpose(0, 1)
    order = [1, 0, 2] if heads * inner < 65536 else [0, 1, 2]
    left = x if order[0] == 1 else x.transpose(0, 1)
    product: torch.Tensor = torch_npu.npu_transpose_batchmatmul(
        left, weight, perm_x1=order, perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
    )
    return product


def _over_latents(
    torch_npu: Any,
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """[B * S, H, C] of queries [B, S, H, C] by the operator's own latent attention, heads filled up to a power of 2."""
    queries, heads = query.shape[1:3]
    missing = (1 << (heads - 1).bit_length()) - heads
    rope = query_rope.transpose(1, 2)
    if missing:
        query, rope = (functional.pad(t, (0, 0, 0, missing)) for t in (query, rope))
    keys, lengths = latent.shape[2], None
    if (buffers := whole_cache(latent, key_rope)) is not None:
        (latent, key_rope), lengths = buffers, [keys]
    latent, key_rope = (t.contiguous().transpose(1, 2) for t in (latent, key_rope))
    extra = {"sparse_mode": 0, "inner_precise": 0}
    if queries > 1:
        extra = causal(Attention(query, latent, latent, None, scaling, None))
    output: torch.Tensor = torch_npu.npu_fused_infer_attention_score_v2(
        query.contiguous(),
        latent,
        latent,
        query_rope=rope.contiguous(),
        key_rope=key_rope,
        actual_seq_kvlen=lengths,
        num_query_heads=heads + missing,
        num_key_value_heads=1,
        softmax_scale=scaling,
        input_layout="BSND_NBSD" if queries <= 16 else "BSND",
        **extra,
    )[0]
    if queries > 16:
        return output[:, :, :heads].flatten(0, 1)
    return output[:heads].flatten(1, 2).transpose(0, 1)


def _over_both(
    torch_npu: Any,
    query: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """[B * S, H, C] with latent and rope side by side as keys. They are the values too, as the inference operator asks
    for keys and values of one shape; where they are too many for it, the training operator takes the latents alone."""
    rank = latent.shape[-1]
    queries = torch.cat((query, query_rope.transpose(1, 2)), dim=-1).transpose(1, 2)
    keys = torch.cat((latent, key_rope), dim=-1)
    if keys.shape[-1] > 512 or queries.shape[1] > 64:
        output = fusion(torch_npu, Attention(queries, keys, latent, attention_mask, scaling, None))
    else:
        output = attend(torch_npu, Attention(queries, keys, keys, attention_mask, scaling, None))
    return output[..., :rank].flatten(0, 1)


def expanded(
    torch_npu: Any,
    query_nope: torch.Tensor,
    query_rope: torch.Tensor,
    latent: torch.Tensor,
    key_rope: torch.Tensor,
    kv_b_weight: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """One product expands the latents to keys and values of every head; then the operator's own rope arguments at
    DeepSeek's sizes, else keys with the rope part beside them."""
    batch, heads, queries, nope = query_nope.shape
    value_dim = kv_b_weight.shape[0] // heads - nope
    if query_nope.numel() == 0:
        return query_nope.new_empty(batch, queries, heads, value_dim)
    both = functional.linear(latent[:, 0], kv_b_weight).unflatten(-1, (heads, -1)).transpose(1, 2)
    keys, values = both[..., :nope], both[..., nope:]
    shared = key_rope.expand(-1, heads, -1, -1)
    sizes = (nope, key_rope.shape[-1], value_dim)
    if sizes == EXPANDED and attention_mask is None and query_nope.dtype != torch.float32:
        attention = Attention(query_nope, keys, values, None, scaling, None)
        return packed(torch_npu, attention, query_rope=rows(query_rope), key_rope=rows(shared))
    query = torch.cat((query_nope, query_rope), dim=-1)
    key = torch.cat((keys, shared), dim=-1)
    return attend(torch_npu, Attention(query, key, values, attention_mask, scaling, None))


KERNELS: dict[tuple[str, str], Kernel] = {
    ("mla_attention", "absorbed"): absorbed,
    ("mla_attention", "expanded"): expanded,
}
