"""RMSNorm and what the vendor fuses with it."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.rules import dtypes, same_shape, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, I310P, Call, VendorOp

PAGES = "op-plugin docs/zh/custom_APIs/torch_npu/"
PAIRS = "f16/f32 bf16/f32 f16/f16 bf16/bf16 f32/f32"


def _trailing(name: str, of: str) -> Any:
    return that(
        f"{name} to have the last dimensions of {of}",
        lambda call: call[of].shape[call[of].dim() - call[name].dim() :] == call[name].shape,
        of,
        name,
    )


def _normed(call: Call, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    x, gamma = call[name], call["gamma"]
    kept = x.shape[: x.dim() - gamma.dim()] + (1,) * gamma.dim()
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(kept, dtype=torch.float32)


def _rms_norm(call: Call) -> Any:
    return _normed(call, "input")


def _add_rms_norm(call: Call) -> Any:
    y, rstd = _normed(call, "x1")
    return y, rstd, torch.empty_like(y)


OPS = (
    VendorOp(
        name="npu_rms_norm",
        schema="(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
        page=PAGES + "(beta)torch_npu-npu_rms_norm.md",
        chips=(A2, A3, I310P),
        outputs=_rms_norm,
        rules=(dtypes("input gamma", PAIRS), _trailing("gamma", "input")),
        explicit=("epsilon",),
        note="result 0 is the norm, result 1 the reciprocal root mean square in float32",
    ),
    VendorOp(
        name="npu_add_rms_norm",
        schema="(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
        page=PAGES + "torch_npu-npu_add_rms_norm.md",
        chips=(A2, A3, I310P),
        outputs=_add_rms_norm,
        rules=(
            dtypes("x1 x2 gamma", "f16/f16/f16 bf16/bf16/bf16 f32/f32/f32"),
            same_shape("x1", "x2"),
            _trailing("gamma", "x1"),
        ),
        explicit=("epsilon",),
        note="result 0 is the norm, result 2 the sum",
    ),
)
