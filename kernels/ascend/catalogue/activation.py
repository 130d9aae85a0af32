"""Gated activations."""

from __future__ import annotations

import torch

from porter.kernels.ascend.catalogue.rules import contiguous, dtypes, multiple, not_empty, rank, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, I310P, PAGES, Call, Rule, VendorOp


def _in_range(name: str) -> Rule:
    return that(
        f"dim to be a dimension of {name}",
        lambda call: -call[name].dim() <= call["dim"] < call[name].dim(),
        "dim",
        name,
    )


def _even(name: str) -> Rule:
    return Rule(
        (name, "dim"),
        f"dimension dim of {name} even",
        lambda call: call[name].shape[call["dim"]] % 2 == 0,
    )


def _halved(call: Call, name: str) -> torch.Tensor:
    x: torch.Tensor = call[name]
    shape = list(x.shape)
    shape[call["dim"]] //= 2
    return x.new_empty(shape)


OPS = (
    VendorOp(
        name="npu_swiglu",
        schema="(Tensor input, int dim=-1) -> Tensor",
        page=PAGES + "(beta)torch_npu-npu_swiglu.md, which lists ascend-910b alone; others: CANN ops-nn "
        "activation/swi_glu/README.md; ascend-310p's multiple of 32: vllm-ascend _310p/ops/activation.py",
        chips=(A2, A3, A5, I310P),
        outputs=lambda call: _halved(call, "input"),
        rules=(
            dtypes("input", "f16 bf16 f32"),
            dtypes("input", "f16 f32", chips=(I310P,)),
            rank("input", *range(1, 9)),
            _in_range("input"),
            _even("input"),
            multiple("input", -1, 32, chips=(I310P,)),
            contiguous("input"),
            not_empty("input"),
        ),
        note="silu of the first half, times the second",
    ),
    VendorOp(
        name="npu_clipped_swiglu",
        schema="(Tensor x, *, Tensor? group_index=None, int dim=-1, float alpha=1.702, float limit=7.0, "
        "float bias=1.0, bool interleaved=True) -> Tensor",
        page=PAGES + "torch_npu-npu_clipped_swiglu.md",
        chips=(A2, A3),
        outputs=lambda call: _halved(call, "x"),
        rules=(
            dtypes("x", "f16 bf16 f32"),
            rank("x", *range(2, 9)),
            _in_range("x"),
            _even("x"),
            contiguous("x"),
            not_empty("x"),
            dtypes("group_index", "i64"),
            rank("group_index", 1),
        ),
        value_rules=(
            that(
                "counts in group_index that are not negative and do not add up to more rows than x has",
                lambda call: call["group_index"] is None or _counts_fit(call),
                "group_index",
                "x",
            ),
        ),
        explicit=("alpha", "limit", "bias", "interleaved"),
        note="min(a, limit) sigmoid(alpha min(a, limit)) (clamp(b, -limit, limit) + bias); the defaults are GPT-OSS's, "
        "with gate and up interleaved; rows past the sum of group_index are undefined",
    ),
)


def _counts_fit(call: Call) -> bool:
    x, counts = call["x"], call["group_index"]
    rows = x.shape[: call["dim"] % x.dim()].numel()
    return bool((counts >= 0).all()) and int(counts.sum()) <= rows
