"""RMSNorm and what the vendor fuses with it."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.rules import contiguous, dtypes, not_empty, rank, same_shape, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, I310P, PAGES, Call, Rule, VendorOp

PAIRS = "f16/f32 bf16/f32 f16/f16 bf16/bf16 f32/f32"
RANKS = tuple(range(1, 9))


def _trailing(name: str, of: str) -> Rule:
    """The page has gamma_shape = x_shape[n:], n < the number of dimensions of x."""
    return that(
        f"{name} to have the last dimensions of {of}",
        lambda call: (
            0 < call[name].dim() <= call[of].dim()
            and call[of].shape[call[of].dim() - call[name].dim() :] == call[name].shape
        ),
        of,
        name,
    )


def _whole_block(name: str, gamma: str) -> Rule:
    """310P reads a row of at least 32 bytes."""
    return that(
        f"normalised dimensions of {name} of 32 bytes or more",
        lambda call: call[gamma].numel() * call[name].element_size() >= 32,
        name,
        gamma,
        chips=(I310P,),
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
        page=PAGES + "(beta)torch_npu-npu_rms_norm.md; ascend-950: CANN ops-nn norm/rms_norm/README.md",
        chips=(A2, A3, A5, I310P),
        outputs=_rms_norm,
        rules=(
            dtypes("input gamma", PAIRS),
            dtypes("input gamma", "f16/f16 f32/f32", chips=(I310P,)),
            rank("input", *RANKS[1:]),
            _trailing("gamma", "input"),
            not_empty("gamma"),
            _whole_block("input", "gamma"),
        ),
        explicit=("epsilon",),
        note="result 0 is the norm, result 1 the reciprocal root mean square in float32; a weight that models store "
        "less one must be made whole first, or given to npu_gemma_rms_norm",
    ),
    VendorOp(
        name="npu_add_rms_norm",
        schema="(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)",
        page=PAGES + "torch_npu-npu_add_rms_norm.md",
        chips=(A2, A3, A5, I310P),
        outputs=_add_rms_norm,
        rules=(
            dtypes("x1 x2 gamma", "f16/f16/f16 bf16/bf16/bf16 f32/f32/f32"),
            dtypes("x1 x2 gamma", "f16/f16/f16 f32/f32/f32", chips=(I310P,)),
            rank("x1", *RANKS),
            same_shape("x1", "x2"),
            _trailing("gamma", "x1"),
            not_empty("x1", "gamma"),
        ),
        explicit=("epsilon",),
        note="result 0 is the norm, result 2 the sum, result 1 the reciprocal root mean square, which ascend-310p "
        "leaves undefined; there is no bias, which smoothed checkpoints have",
    ),
    VendorOp(
        name="npu_gemma_rms_norm",
        schema="(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
        page="torch_npu.npu_gemma_rms_norm.__doc__; CANN ops-nn norm/gemma_rms_norm/docs/aclnnGemmaRmsNorm.md",
        chips=(A2, A3),
        outputs=_rms_norm,
        rules=(
            dtypes("input gamma", "f16/f16 bf16/bf16 f32/f32"),
            rank("input", *RANKS),
            _trailing("gamma", "input"),
            contiguous("input", "gamma"),
            not_empty("input", "gamma"),
        ),
        explicit=("epsilon",),
        note="multiplies by 1 + gamma",
    ),
)
