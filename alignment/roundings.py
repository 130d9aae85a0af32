"""Legitimate ways to round: the same products added in another order, or in pieces that are rounded one by one, and
attention whose scores and probabilities are rounded, where fused attention keeps them wide.

A candidate is free to choose any of them, so the noise of a module is the largest that one of them makes. They are run
only where the source's own way of rounding alone would call a module a drift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

PRODUCTS = {torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm}
NARROW = (torch.bfloat16, torch.float16)


class Reordered(TorchFunctionMode):
    """Linear layers and matrix products whose K is split in halves, the second half first, while the context lasts.

    Halves are summed in float32 (float64 for float64); `rounded_pieces` rounds each to the dtype of the result first,
    as devices do that reduce partial sums between them.
    """

    def __init__(self, rounded_pieces: bool) -> None:
        super().__init__()
        self._rounded_pieces = rounded_pieces

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear and not kwargs:
            return self._linear(*args)
        if func in PRODUCTS and not kwargs and len(args) == 2 and _splits(*args):
            return self._product(*args)
        return func(*args, **kwargs)

    def _linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not _splits(inputs, weight.mT):
            return torch.nn.functional.linear(inputs, weight, bias)
        product = self._product(inputs, weight.mT, None if self._rounded_pieces or bias is None else bias)
        return product + bias if self._rounded_pieces and bias is not None else product

    def _product(self, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        dtype, half = left.dtype, left.shape[-1] // 2
        wide = torch.float32 if dtype in NARROW else dtype
        halves = [
            left[..., half:].to(wide) @ right[..., half:, :].to(wide),
            left[..., :half].to(wide) @ right[..., :half, :].to(wide),
        ]
        if self._rounded_pieces:
            return halves[0].to(dtype) + halves[1].to(dtype)
        total = halves[0] + halves[1]
        return (total if bias is None else total + bias.to(wide)).to(dtype)


class WrittenOut(TorchFunctionMode):
    """Fused attention as transformers' eager attention writes it out, while the context lasts: scores and probabilities
    are rounded to the dtype of the query, only the softmax is in float32 (float64 for float64)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        call = _written_out if func is torch.nn.functional.scaled_dot_product_attention else func
        return call(*args, **(kwargs or {}))


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention` of [..., S, D] without dropout, step by step; rows that see nothing are 0."""
    assert dropout_p == 0.0, "a model that is compared does not drop anything"
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    wide = torch.float32 if query.dtype in NARROW else query.dtype
    return scores.softmax(-1, dtype=wide).nan_to_num(0.0).to(query.dtype) @ value


def other_roundings() -> list[TorchFunctionMode]:
    """The contexts to run the source in, besides as it is written."""
    return [Reordered(rounded_pieces=False), Reordered(rounded_pieces=True), WrittenOut()]


def _splits(left: Any, right: Any) -> bool:
    both = isinstance(left, Tensor) and isinstance(right, Tensor) and left.dtype == right.dtype
    return both and left.is_floating_point() and left.dim() > 1 and right.dim() > 1 and left.shape[-1] > 1
