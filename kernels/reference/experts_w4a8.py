"""Routed experts with int4 weights and int8 activations, in the layout that Ascend's grouped products read.

Each stacked weight is three tensors. For a product of K inputs and N outputs (gate_up: K = H, N = 2I, gate first; down:
K = I, N = H), N even, and G groups of K / G inputs that have a scale each:

- `weight` int8 [E, K, N / 2]: two's complement nibbles of values in [-8, 7]; byte n of row k holds output 2n in its low
  four bits and output 2n + 1 in its high four. Seen as int32 [E, K, N / 8] it is the int4 of npu_grouped_matmul, which
  needs N a multiple of 8. AscendV1 files hold [N / 2, K] of the same bytes per expert: the transpose of one of these.
- `scale` int64 [E, G, N]: the bits of a float32 scale of each group and output in the low half, zero in the high half.
  G = 1 is one scale per output channel, which is what gate_up is stored with. npu_grouped_matmul, which multiplies
  down, documents groups of 256 inputs alone for a bfloat16 result, so down is stored with `scale_groups(K)` of them:
  K / 256 where 256 divides K, else 1, which Ascend refuses. Scales per channel are repeated over the groups.
- `scale_bias` float32 [E, N]: 8 * sum over k of weight * scale. The chip multiplies the two nibbles of an activation
  code separately, the low one shifted by -8, and adds this to make up for the shift, so it is part of the product:
  ((codes - 8) @ (weight * scale) + scale_bias) * activation_scale. A wrong one makes a wrong result, here as there.

`pack_int4`, `pack_scale` and `make_scale_bias` make the three from a plain int4 weight [..., N, K] and its scale.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.activation import swiglu_standard
from porter.kernels.reference.draw import Draw, spread
from porter.kernels.reference.experts import INT8_TOLERANCE, ExpertMLP, routed_sum
from porter.kernels.reference.linear import int8_product, quantize_per_token

SHIFT = 8
"""What the chip takes from the low nibble of a code, to fit it into int4."""
GROUP = 256
"""Inputs that share a scale in npu_grouped_matmul's product of int8 and int4."""


def scale_groups(inputs: int) -> int:
    """The number of scales along K that Ascend's kernel reads of down, for `inputs` inputs: K / 256, or 1."""
    return inputs // GROUP if inputs and inputs % GROUP == 0 else 1


def pack_int4(weight: torch.Tensor) -> torch.Tensor:
    """weight [..., N, K] int8 of values in [-8, 7] -> [..., K, N / 2] int8, output 2n in the low nibble of byte n."""
    low, high = weight[..., 0::2, :], weight[..., 1::2, :]
    return ((low & 15) | (high << 4)).transpose(-1, -2).contiguous()


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_int4`: [..., K, N / 2] int8 -> [..., N, K] int8."""
    low, high = (packed << 4) >> 4, packed >> 4
    return torch.stack((low, high), dim=-1).flatten(-2).transpose(-1, -2)


def pack_scale(scale: torch.Tensor) -> torch.Tensor:
    """float32 scale of any shape -> int64: its bits in the low half, zero above."""
    return scale.float().contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def unpack_scale(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_scale`: the low half of each int64 as a float32."""
    low = packed & 0xFFFFFFFF
    return torch.where(low > 0x7FFFFFFF, low - (1 << 32), low).to(torch.int32).view(torch.float32)


def make_scale_bias(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight [..., N, K] int8, scale [..., G, N] -> float32 [..., N]: 8 * sum over k of weight * scale."""
    exact: torch.Tensor = SHIFT * (_group_sums(weight, scale.shape[-2]) * scale.double()).sum(dim=-2)
    return exact.float()


def _group_sums(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """weight [..., N, K] -> float64 [..., G, N]: its sums over the inputs of each group, exact."""
    sums: torch.Tensor = weight.unflatten(-1, (groups, -1)).sum(dim=-1, dtype=torch.int64)
    return sums.transpose(-1, -2).double()


def product_w4a8(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, scale_bias: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """x [T, K] quantized per token, times one expert's packed weight, scale and scale_bias -> [T, N] in `dtype`.

    (codes @ (weight * scale) + (scale_bias - 8 * sum(weight * scale))) * activation_scale: the chip's formula with the
    large terms, which cancel where scale_bias is right, taken together.
    """
    codes, activation_scale = quantize_per_token(x)
    plain, factor = unpack_int4(weight), unpack_scale(scale)
    shift = (SHIFT * _group_sums(plain, len(factor)).to(dtype) * factor.to(dtype)).sum(dim=0)
    total = (scale_bias.to(dtype) - shift).expand(len(x), -1)
    for group, group_codes, group_factor in zip(
        plain.chunk(len(factor), dim=-1), codes.chunk(len(factor), dim=-1), factor.to(dtype), strict=True
    ):
        total = total + int8_product(group_codes, group).to(dtype) * group_factor
    return total * activation_scale.to(dtype)


def _mlp(dtype: torch.dtype | None, *stacked: torch.Tensor) -> ExpertMLP:
    gate_up, gate_up_scale, gate_up_scale_bias, down, down_scale, down_scale_bias = stacked

    def mlp(x: torch.Tensor, expert: int) -> torch.Tensor:
        wide = dtype or x.dtype
        both = product_w4a8(x, gate_up[expert], gate_up_scale[expert], gate_up_scale_bias[expert], wide)
        gated = swiglu_standard(both).to(x.dtype)
        return product_w4a8(gated, down[expert], down_scale[expert], down_scale_bias[expert], wide)

    return mlp


def experts_w4a8(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    gate_up_scale_bias: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    down_scale_bias: torch.Tensor,
) -> torch.Tensor:
    """As experts/w8a8 with packed int4 weights: hidden [T, H], top_k_index [T, k] int64, top_k_weights [T, k], gate_up
    int8 [E, H, I], its scale int64 [E, G, 2I] and scale_bias [E, 2I], down int8 [E, I, H / 2], its scale int64
    [E, G, H] and scale_bias [E, H] -> [T, H]. The layout is this file's; the two products may differ in G."""
    mlp = _mlp(None, gate_up, gate_up_scale, gate_up_scale_bias, down, down_scale, down_scale_bias)
    dtype = compute_dtype(hidden.dtype)
    return routed_sum(hidden, top_k_index, top_k_weights, gate_up.shape[0], mlp, dtype).to(hidden.dtype)


def experts_w4a8_exact(
    hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, *stacked: torch.Tensor
) -> torch.Tensor:
    """float64 oracle: codes chosen in the compute dtype, everything else in float64."""
    mlp = _mlp(torch.float64, *stacked)
    return routed_sum(hidden, top_k_index, top_k_weights, stacked[0].shape[0], mlp, torch.float64)


def _fake(hidden: torch.Tensor, *rest: object) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


def _cost(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *stacked: torch.Tensor) -> Cost:
    """Reads the weights of the experts that are hit: at most one per token and choice; two weights per byte."""
    experts = stacked[0].shape[0]
    hit = min(experts, index.numel())
    per_expert = 2 * sum(w[0].numel() for w in stacked if w.dtype == torch.int8)
    moved = moved_bytes(hidden, hidden, index, weights) + moved_bytes(*stacked) * hit // experts
    return Cost(moved, 2 * index.numel() * per_expert)


SHAPES = (  # tokens, hidden size, intermediate size, experts, top_k
    (1, 2, 1, 1, 1),
    (5, 34, 17, 4, 4),
    (1, 64, 32, 8, 2),
    (13, 96, 60, 16, 3),
    (37, 64, 256, 3, 1),
    (6, 512, 512, 4, 2),
    (3, 512, 768, 4, 2),
    (0, 32, 16, 4, 2),
)


def _stacked(draw: Draw, experts: int, outputs: int, inputs: int, groups: int) -> tuple[torch.Tensor, ...]:
    """(weight, scale, scale_bias) of about unit output variance."""
    weight = draw.integers(-8, 8, experts, outputs, inputs).to(torch.int8)
    scale = (draw.uniform(experts, groups, outputs) + 0.5) / (4.6 * inputs**0.5)
    return pack_int4(weight), pack_scale(scale), make_scale_bias(weight, scale)


def _routed(draw: Draw) -> Iterator[tuple[str, tuple[torch.Tensor, ...], int, int, int]]:
    """(label, (hidden, top_k_index, top_k_weights), H, I, E)."""
    for tokens, size, intermediate, experts, top_k in SHAPES:
        weights, index = draw.uniform(tokens, experts).topk(top_k, dim=-1)
        label = f"T={tokens} H={size} I={intermediate} E={experts} k={top_k}"
        yield label, (draw.normal(tokens, size), index, weights), size, intermediate, experts
    weights, index = draw.uniform(4, 6).topk(2, dim=-1)
    yield "zeros, 1e4 and 1e-4", (draw.extreme_rows(48), index, weights), 48, 32, 6
    yield "rows apart", (spread(draw.normal(4, 48)), index, weights), 48, 32, 6
    yield "experts elsewhere", (draw.normal(4, 48), torch.where(index > 2, 6, index), weights), 48, 32, 6


def _inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 84)
    for label, routed, size, intermediate, experts in _routed(draw):
        for groups in dict.fromkeys((1, scale_groups(size))):
            gate_up = _stacked(draw, experts, 2 * intermediate, size, groups)
            down = _stacked(draw, experts, size, intermediate, scale_groups(intermediate))
            yield Case(f"{label} groups={groups}", (*routed, *gate_up, *down))


TOLERANCE = Tolerance(
    f"{INT8_TOLERANCE.argument}; the two sums of 8 * weight * scale that cancel may round apart",
    terms=lambda hidden, index, weights, *stacked: 64.0 * (hidden.shape[-1] + stacked[3].shape[1] + index.shape[-1]),
    roundings=INT8_TOLERANCE.roundings,
    floor=INT8_TOLERANCE.floor,
)

SCHEMA = (
    "(Tensor hidden, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up, Tensor gate_up_scale, "
    "Tensor gate_up_scale_bias, Tensor down, Tensor down_scale, Tensor down_scale_bias) -> Tensor"
)

OPS = (Op("experts", "w4a8", SCHEMA, experts_w4a8, _fake, _inputs, TOLERANCE, _cost, exact=experts_w4a8_exact),)
