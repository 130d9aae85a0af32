"""Masks, biases and cached keys in the form that the vendor's attention operators read."""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

from porter.kernels.ascend.catalogue.attention_layouts import COMPRESSED
from porter.kernels.ascend.catalogue.vendor_op import VendorRefusal


@cache
def compressed_mask(device: torch.device) -> torch.Tensor:
    """The one mask [2048, 2048] that stands for all causal and banded ones, True above the diagonal; made once for
    each device."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu(1)


def hidden(attention_mask: torch.Tensor) -> torch.Tensor:
    """A bool mask, True = attend, as the vendor's, True = masked out."""
    return torch.logical_not(attention_mask).contiguous()


def as_bias(attention_mask: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[B or 1, heads, Q, S] to add to the scores. The operators read only biases of every head right, and finite ones:
    -inf becomes the lowest value of the dtype. Raises VendorRefusal for a bias that the dtype would round."""
    lowest = torch.finfo(dtype).min
    if attention_mask.dtype == torch.bool:
        zeros = torch.zeros(attention_mask.shape, dtype=dtype, device=attention_mask.device)
        bias = zeros.masked_fill(torch.logical_not(attention_mask), lowest)
    elif attention_mask.dtype == dtype:
        bias = attention_mask.clamp_min(lowest)
    else:
        raise VendorRefusal(f"an additive attention_mask of {attention_mask.dtype} beside {dtype} would be rounded")
    return bias.expand(-1, heads, -1, -1).contiguous()


def without_keys(attention_mask: torch.Tensor) -> torch.Tensor:
    """[B or 1, Q, 1 or heads, 1] True where a query may see no key at all."""
    if attention_mask.dtype == torch.bool:
        dead = torch.logical_not(attention_mask.any(dim=-1))
    else:
        dead = attention_mask.amax(dim=-1) == -torch.inf
    return dead.transpose(1, 2)[..., None]


def up_to(size: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with their last dimension filled up with zeros to `size`."""
    return [t if t.shape[-1] == size else functional.pad(t, (0, size - t.shape[-1])) for t in tensors]


def whole_cache(*tensors: torch.Tensor) -> list[torch.Tensor] | None:
    """The contiguous buffers [B, N, longest, D] of which the tensors are the first keys, all of one length; None where
    they are no such views, or contiguous themselves.

    Reading the buffer up to a length spares a copy of every key at every token.
    """
    lengths = {_capacity(t) for t in tensors}
    capacity = lengths.pop()
    if lengths or capacity is None:
        return None
    shapes = [(*t.shape[:2], capacity, t.shape[3]) for t in tensors]
    if any(t.is_meta for t in tensors):
        return [t.new_empty(shape) for t, shape in zip(tensors, shapes, strict=True)]
    for tensor, shape in zip(tensors, shapes, strict=True):
        end = tensor.storage_offset() + torch.Size(shape).numel()
        if end * tensor.element_size() > tensor.untyped_storage().nbytes():
            return None
    return [
        t.as_strided(shape, torch.empty(shape, device="meta").stride())
        for t, shape in zip(tensors, shapes, strict=True)
    ]


def _capacity(tensor: torch.Tensor) -> int | None:
    heads, keys, dim = tensor.shape[1:]
    if tensor.is_contiguous() or tensor.stride()[2:] != (dim, 1):
        return None
    outer = tensor.stride(1) if heads > 1 else tensor.stride(0)
    capacity = outer // dim
    wanted = heads * capacity * dim, capacity * dim
    fits = all(
        size == 1 or have == want for size, have, want in zip(tensor.shape, tensor.stride(), wanted, strict=False)
    )
    return capacity if fits and outer % dim == 0 and capacity >= keys else None
