"""Hyper-connections as the vendor documents them, in float32."""

from __future__ import annotations

import torch

from porter.kernels.ascend.catalogue.vendor_op import Call


def npu_mhc_pre(call: Call) -> tuple[torch.Tensor, ...]:
    """(streams weighted by sigmoid + hc_eps, 2 sigmoid, mixing logits), and what led to them where out_flag asks."""
    x = call["x"].float()
    count = x.shape[-2]
    flat = x.flatten(-2)
    inverse = torch.rsqrt(flat.square().mean(-1) + call["norm_eps"])
    scaled = flat if call["gamma"] is None else flat * call["gamma"].flatten()
    mix = scaled @ call["phi"].T
    pre, post, rest = (mix * inverse.unsqueeze(-1)).split([count, count, count * count], dim=-1)
    biases, alpha = call["bias"].split([count, count, count * count]), call["alpha"]
    pre = torch.sigmoid(pre * alpha[0] + biases[0]) + call["hc_eps"]
    post = 2 * torch.sigmoid(post * alpha[1] + biases[1])
    mixing = (rest * alpha[2] + biases[2]).unflatten(-1, (count, count))
    read = (pre.unsqueeze(-1) * x).sum(-2).to(call["x"].dtype)
    beside = (inverse, mix, pre) if call["out_flag"] else tuple(torch.empty(0) for _ in range(3))
    return read, post, mixing, *beside


def npu_mhc_sinkhorn(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax of rows + eps; columns, then in turn rows and columns, divided by their sums + eps."""
    weights = torch.softmax(call["x"], dim=-1) + call["eps"]
    weights = weights / (weights.sum(-2, keepdim=True) + call["eps"])
    for _ in range(int(call["num_iters"]) - 1):
        for dim in (-1, -2):
            weights = weights / (weights.sum(dim, keepdim=True) + call["eps"])
    return weights, torch.empty(0), torch.empty(0)


def npu_mhc_post(call: Call) -> torch.Tensor:
    """Stream k becomes h_post[k] h_out + sum over j of h_res[j, k] x[j]; x[k] itself without h_res."""
    x = call["x"].float()
    mixed = x if call["h_res"] is None else call["h_res"].transpose(-1, -2) @ x
    written: torch.Tensor = call["h_post"].unsqueeze(-1) * call["h_out"].float().unsqueeze(-2) + mixed
    return written.to(call["x"].dtype)


SEMANTICS = {"npu_mhc_pre": npu_mhc_pre, "npu_mhc_sinkhorn": npu_mhc_sinkhorn, "npu_mhc_post": npu_mhc_post}
