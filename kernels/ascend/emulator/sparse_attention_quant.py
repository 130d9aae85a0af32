"""Sparse attention over int8 caches, as the vendor documents it: exact int8 products, everything else in float32."""

from __future__ import annotations

import torch

from porter.kernels.ascend.catalogue.attention_layouts import LATENT, ROPE
from porter.kernels.ascend.catalogue.sparse_attention import selected_shape
from porter.kernels.ascend.catalogue.sparse_attention_layout import gathered, spans
from porter.kernels.ascend.catalogue.sparse_attention_quant import TILE
from porter.kernels.ascend.catalogue.vendor_op import Call
from porter.kernels.ascend.emulator.sparse_attention import NOTHING, selected_tokens, shifted_softmax


def npu_quant_lightning_indexer(call: Call) -> torch.Tensor:
    """The visible keys of highest sum over heads of weights * relu(query scale * key scale * (query . key))."""
    codes = call["query"].reshape(-1, *call["query"].shape[-2:]).int()
    heads = (codes.shape[0], codes.shape[1])
    weights, scales = (call[n].reshape(heads).float() for n in ("weights", "query_dequant_scale"))
    indices = torch.full((codes.shape[0], call["sparse_count"]), NOTHING, dtype=torch.int32)
    for span in spans(call, "key"):
        keys, key_scales = (gathered(call, n, span, "key") for n in ("key", "key_dequant_scale"))
        for row in range(span.queries):
            visible, at = span.visible(row, call["sparse_mode"] == 3), span.rows.start + row
            products = (codes[at] @ keys[:visible].int().T).float() * scales[at][:, None] * key_scales[:visible].float()
            best = (weights[at] @ products.relu()).topk(min(call["sparse_count"], visible)).indices
            indices[at, : best.shape[0]] = best.to(torch.int32)
    return indices.view(selected_shape(call))


def npu_kv_quant_sparse_flash_attention(call: Call) -> torch.Tensor:
    """npu_sparse_flash_attention over latents that are unpacked and multiplied by the scale of their tile, then rounded
    to the dtype of the queries."""
    query = call["query"].reshape(-1, *call["query"].shape[-2:])
    rows = call["sparse_indices"].reshape(query.shape[0], -1)
    output = torch.full((*query.shape[:-1], LATENT), torch.nan)
    for span in spans(call, "kv"):
        latent, rope = _unpacked(gathered(call, "key", span, "kv"), query.dtype)
        for row in range(span.queries):
            at = span.rows.start + row
            chosen = selected_tokens(rows[at], span, row, call)
            keys = torch.cat((latent, rope), dim=1)[chosen].float()
            weights = shifted_softmax(query[at].float() @ keys.T * call["scale_value"], None)[2]
            output[at] = weights.to(query.dtype).float() @ latent[chosen].float()
    return output.to(query.dtype).view(*call["query"].shape[:-1], LATENT)


def _unpacked(keys: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(latent [T, 512], rotated part [T, 64]) in `dtype` of packed keys [T, 656]."""
    codes, rope, scales = keys.contiguous().split([LATENT, 2 * ROPE, 4 * LATENT // TILE], dim=1)
    widened = codes.float().view(-1, LATENT // TILE, TILE) * scales.contiguous().view(torch.float32).unsqueeze(-1)
    return widened.view(-1, LATENT).to(dtype), rope.contiguous().view(dtype)


SEMANTICS = {
    "npu_quant_lightning_indexer": npu_quant_lightning_indexer,
    "npu_kv_quant_sparse_flash_attention": npu_kv_quant_sparse_flash_attention,
}
