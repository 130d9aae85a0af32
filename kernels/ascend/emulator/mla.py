"""What comes before multi-head latent attention on the CPU, and products of one matrix for each head."""

from __future__ import annotations

import torch

from porter.kernels.ascend.catalogue.mla_products import permuted
from porter.kernels.ascend.catalogue.vendor_op import Call


def npu_transpose_batchmatmul(call: Call) -> torch.Tensor:
    """[B, M, K] times [B, K, N] in float32, rounded once, laid out as [M, B, N]."""
    left, right = permuted(call["input"], call["perm_x1"]), call["weight"]
    return torch.matmul(left.float(), right.float()).to(left.dtype).transpose(0, 1).contiguous()


def npu_mla_prolog_v2(call: Call) -> tuple[torch.Tensor, ...]:
    """The queries over the latents, their rope part, the two caches after the tokens were written, and one number."""
    query, rope, _ = _prolog(call)
    return query, rope, call["kv_cache"], call["kr_cache"], torch.zeros(1)


def npu_mla_prolog_v3(call: Call) -> tuple[torch.Tensor, ...]:
    """The queries over the latents, their rope part, nothing, the normed query latent where asked for, nothing."""
    query, rope, normed = _prolog(call)
    nothing = [torch.zeros(0) for _ in range(2)]
    return query, rope, nothing[0], normed if call["query_norm_flag"] else normed.new_empty(0), nothing[1]


def _prolog(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query [.., N, Hckv], its rope part [.., N, Dr] and c^Q [.., Hcq]; writes the keys into the caches."""
    x, uk = call["token_x"], call["weight_uk"]
    heads, nope, rank = uk.shape
    sin, cos = call["rope_sin"], call["rope_cos"]
    normed = _rms_norm(_product(x, call["weight_dq"]), call["rmsnorm_gamma_cq"], call["rmsnorm_epsilon_cq"])
    expanded = _product(normed, call["weight_uq_qr"]).unflatten(-1, (heads, -1))
    query = torch.matmul(expanded[..., None, :nope].float(), uk.float())[..., 0, :].to(x.dtype)
    rope = _rope(expanded[..., nope:], sin[..., None, :], cos[..., None, :])
    keys = _product(x, call["weight_dkv_kr"])
    latent = _rms_norm(keys[..., :rank], call["rmsnorm_gamma_ckv"], call["rmsnorm_epsilon_ckv"])
    for cache, rows in (("kv_cache", latent), ("kr_cache", _rope(keys[..., rank:], sin, cos))):
        slots = call[cache].view(-1, rows.shape[-1])
        slots[call["cache_index"].reshape(-1)] = rows.reshape(-1, rows.shape[-1])
    return query, rope, normed


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.matmul(x.float(), weight.float()).to(x.dtype)


def _rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon) * gamma.float()).to(x.dtype)


def _rope(x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """Pairs are neighbours in the input and half a head apart in the output."""
    even, odd = x[..., ::2].float(), x[..., 1::2].float()
    turned = torch.cat((even, odd), dim=-1) * cos.float() + torch.cat((-odd, even), dim=-1) * sin.float()
    return turned.to(x.dtype)


SEMANTICS = {
    "npu_transpose_batchmatmul": npu_transpose_batchmatmul,
    "npu_mla_prolog_v2": npu_mla_prolog_v2,
    "npu_mla_prolog_v3": npu_mla_prolog_v3,
}
