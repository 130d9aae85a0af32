"""What comes before multi-head latent attention on the CPU, and products of one matrix for each head."""

from __future__ import annotations

import torch

from porter.kernels.ascend.catalogue.mla_products import permuted
from porter.kernels.ascend.catalogue.vendor_op import Call
from porter.kernels.ascend.emulator.norm import normed
from porter.kernels.ascend.emulator.rope import halves_of_pairs, turned_halves


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
    query, rope, latent = _prolog(call)
    nothing = [torch.zeros(0) for _ in range(2)]
    return query, rope, nothing[0], latent if call["query_norm_flag"] else latent.new_empty(0), nothing[1]


def _prolog(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query [.., N, Hckv], its rope part [.., N, Dr] and c^Q [.., Hcq]; writes the keys into the caches."""
    x, uk = call["token_x"], call["weight_uk"]
    heads, nope, rank = uk.shape
    sin, cos = call["rope_sin"], call["rope_cos"]
    gammas = [call[f"rmsnorm_gamma_{name}"].float() for name in ("cq", "ckv")]
    query_latent, _ = normed(_product(x, call["weight_dq"]), gammas[0], call["rmsnorm_epsilon_cq"])
    expanded = _product(query_latent, call["weight_uq_qr"]).unflatten(-1, (heads, -1))
    query = torch.matmul(expanded[..., None, :nope].float(), uk.float())[..., 0, :].to(x.dtype)
    rope = _rope(expanded[..., nope:], sin[..., None, :], cos[..., None, :])
    keys = _product(x, call["weight_dkv_kr"])
    latent, _ = normed(keys[..., :rank], gammas[1], call["rmsnorm_epsilon_ckv"])
    for cache, rows in (("kv_cache", latent), ("kr_cache", _rope(keys[..., rank:], sin, cos))):
        slots = call[cache].view(-1, rows.shape[-1])
        slots[call["cache_index"].reshape(-1)] = rows.reshape(-1, rows.shape[-1])
    return query, rope, query_latent


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.matmul(x.float(), weight.float()).to(x.dtype)


def _rope(x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """Pairs are neighbours in the input and half a head apart in the output."""
    return turned_halves(halves_of_pairs(x.float()), cos.float(), sin.float()).to(x.dtype)


SEMANTICS = {
    "npu_transpose_batchmatmul": npu_transpose_batchmatmul,
    "npu_mla_prolog_v2": npu_mla_prolog_v2,
    "npu_mla_prolog_v3": npu_mla_prolog_v3,
}
