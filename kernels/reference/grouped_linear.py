"""A block-diagonal linear layer: each group of the input has rows of the weight of its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.kernels.contract import Case, Cost, Op, Tolerance, compute_dtype, moved_bytes
from porter.kernels.reference.draw import Draw, spread

TOLERANCE = Tolerance(
    "a dot product over K, rounded once to the output dtype",
    terms=lambda x, weight: 64.0 * x.shape[-1],
)


def linear_grouped(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., G, K], weight [G R, K] with the rows of each group together -> [..., G, R].

    Equals transformers' DeepseekV4GroupedLinear.
    """
    groups, dtype = x.shape[-2], compute_dtype(x.dtype)
    stacked = weight.to(dtype).unflatten(0, (groups, -1))
    rows = x.to(dtype).flatten(0, -3) if x.dim() > 2 else x.to(dtype).unsqueeze(0)
    product = torch.bmm(rows.transpose(0, 1), stacked.transpose(1, 2)).transpose(0, 1)
    return product.reshape(*x.shape[:-1], stacked.shape[1]).to(x.dtype)


def _fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // x.shape[-2]))


def _cost(x: torch.Tensor, weight: torch.Tensor) -> Cost:
    rows = x.numel() // x.shape[-1]
    out = rows * (weight.shape[0] // x.shape[-2])
    return Cost(moved_bytes(x, weight) + out * x.element_size(), 2 * out * x.shape[-1])


SHAPES = ((1, 1, 1, 1, 1), (2, 5, 2, 16, 8), (1, 1, 8, 64, 24), (3, 7, 5, 33, 17), (1, 37, 2, 128, 96), (0, 3, 2, 8, 4))


def _inputs(dtype: torch.dtype) -> Iterator[Case]:
    draw = Draw(dtype, 33)
    for batch, length, groups, size, rows in SHAPES:
        weight = draw.normal(groups * rows, size, scale=size**-0.5)
        label = f"B, S, G, K, R = {batch, length, groups, size, rows}"
        yield Case(label, (draw.normal(batch, length, groups, size), weight))
    weight = draw.normal(6, 32, scale=0.2)
    yield Case("no rows before the groups", (draw.normal(2, 32), weight))
    yield Case("rows apart", (spread(draw.normal(3, 2, 32)), weight))
    yield Case("groups transposed", (draw.normal(3, 2, 5, 32).transpose(1, 2), weight))
    yield Case("zeros, 1e4 and 1e-4", (draw.extreme_rows(64).unflatten(-1, (2, 32)), weight))


SCHEMA = "(Tensor x, Tensor weight) -> Tensor"

OPS = (Op("linear", "grouped", SCHEMA, linear_grouped, _fake, _inputs, TOLERANCE, _cost),)
