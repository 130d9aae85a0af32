"""Products of one matrix for each head, as multi-head latent attention needs them on either side."""

from __future__ import annotations

import torch

from porter.kernels.ascend.catalogue.rules import absent, dtypes, multiple, one_of, rank, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, PAGES, Call, Rule, VendorOp

SCHEMA = (
    "(Tensor input, Tensor weight, *, Tensor? bias=None, Tensor? scale=None, int[]? perm_x1=None, int[]? "
    "perm_x2=None, int[]? perm_y=None, int? batch_split_factor=1) -> Tensor"
)


def permuted(input: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    """The first matrix as [B, M, K]: in place, or from [M, B, K]."""
    return input.transpose(0, 1) if order and list(order) == [1, 0, 2] else input


def _order(name: str, *allowed: list[int]) -> Rule:
    text = " or ".join(map(str, allowed))
    return that(f"{name} {text}", lambda call: call[name] is None or list(call[name]) in allowed, name)


def _fits(call: Call) -> bool:
    left, right = permuted(call["input"], call["perm_x1"]), call["weight"]
    return (left.shape[0], left.shape[2]) == (right.shape[0], right.shape[1])


def _limits(call: Call) -> bool:
    left, right = permuted(call["input"], call["perm_x1"]), call["weight"]
    batch, inner = left.shape[0], left.shape[2]
    reduced = inner * batch if left is not call["input"] else inner
    return 1 <= batch < 65536 and reduced < 65536 and 1 <= right.shape[2] < 65536


def _product(call: Call) -> torch.Tensor:
    left, right = permuted(call["input"], call["perm_x1"]), call["weight"]
    return left.new_empty(left.shape[1], left.shape[0], right.shape[2])


OPS = (
    VendorOp(
        name="npu_transpose_batchmatmul",
        schema=SCHEMA,
        page=PAGES + "torch_npu-npu_transpose_batchmatmul.md",
        chips=(A2, A3, A5),
        outputs=_product,
        rules=(
            absent("bias", why="is not supported yet"),
            absent("scale"),
            dtypes("input weight", "f16/f16 bf16/bf16 f32/f32"),
            rank("input", 3),
            rank("weight", 3),
            _order("perm_x1", [0, 1, 2], [1, 0, 2]),
            _order("perm_x2", [0, 1, 2]),
            _order("perm_y", [1, 0, 2]),
            one_of("batch_split_factor", 1, None),
            that("weight [B, K, N] of the batch and the inner size of input", _fits, "input", "weight", "perm_x1"),
            multiple("weight", 1, 16),
            multiple("weight", 2, 16),
            that(
                "B, N and K below 65536, and K * B too where perm_x1 is [1, 0, 2]",
                _limits,
                "input",
                "weight",
                "perm_x1",
            ),
        ),
        note="[B, M, K] or, with perm_x1 [1, 0, 2], [M, B, K], times [B, K, N] -> [M, B, N]. The page lists A2 and A3; "
        "vllm-ascend calls it on 950 too (mla_v1.py)",
    ),
)
