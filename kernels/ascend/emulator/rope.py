"""Rotary embeddings as the vendor documents them: products in float32, rounded once."""

from __future__ import annotations

import torch

from porter.kernels.ascend.catalogue.vendor_op import Call


def turned_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x cos + (-second half, first half) sin."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def turned_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x cos + (-x1, x0, -x3, x2, ...) sin."""
    even, odd = x[..., 0::2], x[..., 1::2]
    swapped = torch.stack((-odd, even), dim=-1).flatten(-2)
    return x * cos + swapped * sin


def halves_of_pairs(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] seen as [D/2, 2], transposed to [2, D/2]: even positions first, then odd ones."""
    pairs: torch.Tensor = x.unflatten(-1, (-1, 2))
    return pairs.transpose(-1, -2).flatten(-2)


MODES = {"half": turned_halves, "interleave": turned_neighbours}


def npu_rotary_mul(call: Call) -> torch.Tensor:
    """input turned by r1 (cosines) and r2 (sines), which are rounded to its dtype."""
    x = call["input"]
    cos, sin = (call[name].to(x.dtype).float() for name in ("r1", "r2"))
    return MODES[call["rotary_mode"]](x.float(), cos, sin).to(x.dtype).contiguous()


def npu_apply_rotary_pos_emb(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """query and key turned in place."""
    cos, sin = call["cos"].float(), call["sin"].float()
    for states in (call["query"], call["key"]):
        states.copy_(MODES[call["rotary_mode"]](states.float(), cos, sin))
    return call["query"], call["key"]


def npu_interleave_rope(call: Call) -> torch.Tensor:
    """Neighbours in, halves out."""
    halves = halves_of_pairs(call["x"].float())
    return turned_halves(halves, call["cos"].float(), call["sin"].float()).to(call["x"].dtype).contiguous()


SEMANTICS = {
    "npu_rotary_mul": npu_rotary_mul,
    "npu_apply_rotary_pos_emb": npu_apply_rotary_pos_emb,
    "npu_interleave_rope": npu_interleave_rope,
}
