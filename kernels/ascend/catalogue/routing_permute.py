"""Sorting rows of tokens by expert and back, without counting them."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.routing import ACLNN, within
from porter.kernels.ascend.catalogue.rules import absent, dtypes, one_of, rank, size, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, Call, VendorOp

DOCSTRING = "docstrings of torch_npu 2.13; "


def _permute(call: Call) -> Any:
    tokens, wanted = call["tokens"], call["num_out_tokens"] or 0
    rows = call["indices"].numel()
    kept = min(wanted, rows) if wanted > 0 else rows + wanted
    return tokens.new_empty((kept, tokens.shape[1])), tokens.new_empty(rows, dtype=torch.int32)


def _unpermute(call: Call) -> Any:
    rows, probs = call["permuted_tokens"], call["probs"]
    return rows.new_empty((call["sorted_indices"].shape[0] // (1 if probs is None else probs.shape[1]), rows.shape[1]))


OPS = (
    VendorOp(
        name="npu_moe_token_permute",
        schema="(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False) -> (Tensor, Tensor)",
        page=DOCSTRING + f"{ACLNN}moe_token_permute/docs/aclnnMoeTokenPermute.md",
        chips=(A2, A3),
        outputs=_permute,
        rules=(
            dtypes("tokens", "bf16"),
            rank("tokens", 2),
            dtypes("indices", "i64"),
            rank("indices", 2),
            size("indices", 1, "at most 512", lambda n: n <= 512),
            that(
                "indices [tokens, k]",
                lambda call: call["indices"].shape[0] == call["tokens"].shape[0],
                "indices",
                "tokens",
            ),
            that("fewer than 16777215 indices", lambda call: call["indices"].numel() < 16777215, "indices"),
            one_of("padded_mode", False),
        ),
        value_rules=(within("indices", 0, lambda call: 16777215, "indices from 0 to below 16777215"),),
        note="the second result is where each of the rows of a token lies among the sorted ones, row by row",
    ),
    VendorOp(
        name="npu_moe_token_unpermute",
        schema="(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, bool padded_mode=False, "
        "int[]? restore_shape=None) -> Tensor",
        page=DOCSTRING + f"{ACLNN}moe_token_unpermute/docs/aclnnMoeTokenUnpermute.md",
        chips=(A2, A3),
        outputs=_unpermute,
        rules=(
            dtypes("permuted_tokens probs", "bf16/bf16"),
            rank("permuted_tokens", 2),
            dtypes("sorted_indices", "i32"),
            rank("sorted_indices", 1),
            rank("probs", 2),
            size("probs", 1, "at most 512", lambda n: n <= 512),
            that(
                "sorted_indices of as many values as permuted_tokens has rows, and probs has values",
                lambda call: (
                    call["sorted_indices"].shape[0]
                    == call["permuted_tokens"].shape[0]
                    == (call["sorted_indices"] if call["probs"] is None else call["probs"]).numel()
                ),
                "sorted_indices",
                "permuted_tokens",
                "probs",
            ),
            one_of("padded_mode", False),
            absent("restore_shape"),
        ),
        value_rules=(
            that(
                "sorted_indices to be each of the rows once (negative ones are rows of inactive experts)",
                lambda call: torch.equal(
                    call["sorted_indices"].sort()[0].cpu().long(), torch.arange(call["sorted_indices"].numel())
                ),
                "sorted_indices",
            ),
        ),
        note="a weight of 0 does not clear rows that are NaN",
    ),
)
