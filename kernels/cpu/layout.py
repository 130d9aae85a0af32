"""What the CPU kernels ask of tensors: dtypes, rows a constant distance apart, threads worth their start."""

from __future__ import annotations

import torch

from porter.kernels.cpu.library import DTYPE_CODES

FLOAT_CODES = {dtype: DTYPE_CODES[dtype] for dtype in (torch.float32, torch.bfloat16)}

FLOAT32_OVER_BFLOAT16 = torch.float32, torch.bfloat16
"""The only two dtypes, of activations and of weights, that products of floating point take together."""

NOT_CPU = "tensors are not on the CPU"
NOT_FLOAT = "activations are neither float32 nor bfloat16"
OTHER_DTYPE = "tensors differ in dtype"
NOT_CONTIGUOUS = "weights are not contiguous"
EMPTY = "a tensor is empty"
OTHER_SHAPE = "shapes do not fit each other"

PARALLEL_BYTES = 1 << 16
"""Below this much memory traffic one thread is used: waking others would cost more than they save. An estimate, not yet
measured."""


def threads_for(moved_bytes: int) -> int:
    """How many threads a kernel that moves this many bytes should use."""
    return torch.get_num_threads() if moved_bytes >= PARALLEL_BYTES else 1


def rows_of(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`x`, or a contiguous copy of it, whose last dimension is contiguous and whose rows lie one stride apart; and that
    stride in elements."""
    shape = x.shape
    if x.is_contiguous():
        return x, shape[-1]
    strides = x.stride()
    if strides[-1] != 1 and shape[-1] != 1:
        return x.contiguous(), shape[-1]
    row_stride, expected = None, 0
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if size == 1:
            continue
        if row_stride is None:
            row_stride, expected = stride, stride
        elif stride != expected:
            return x.contiguous(), shape[-1]
        expected *= size
    return x, shape[-1] if row_stride is None else row_stride
