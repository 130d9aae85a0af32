"""The gated delta rule of Qwen3-Next: whole sequences in chunks, and decode with states in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from porter.kernels.ascend.catalogue.rules import dtypes, given, rank, that
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, PAGES, Call, Rule, VendorOp

LOOSE = 1.0 + 2.0**-7
"""The norm of a unit vector whose values were rounded to bfloat16, at most."""


def _heads(most: int, largest: int) -> tuple[Rule, ...]:
    """Shapes of queries, keys and values, and bounds on their heads and sizes."""

    def fit(call: Call) -> bool:
        query, key, value = call["query"], call["key"], call["value"]
        return bool(query.shape == key.shape and value.shape[0] == key.shape[0] and value.shape[1] % key.shape[1] == 0)

    def bounded(call: Call) -> bool:
        return all(call[n].shape[1] <= most and call[n].shape[2] <= largest for n in ("key", "value"))

    return (
        rank("query", 3),
        rank("key", 3),
        rank("value", 3),
        that("query, key and value without an empty dimension", _filled, "query", "key", "value"),
        that(
            "key [tokens, heads, size] of query's shape, value of its tokens and a multiple of its heads",
            fit,
            "query",
            "key",
            "value",
        ),
        that(f"{most} heads and {largest} dimensions at most", bounded, "key", "value"),
        _per_head("beta"),
        _per_head("g"),
        dtypes("actual_seq_lengths", "i32"),
        rank("actual_seq_lengths", 1),
        given("scale", why="the vendor's code refuses None, which its page calls 1.0; models need 1 / sqrt(size)"),
    )


def _filled(call: Call) -> bool:
    return all(call[name].numel() > 0 for name in ("query", "key", "value"))


def _per_head(name: str) -> Rule:
    return that(
        f"{name} [tokens, heads of value]",
        lambda call: call[name] is None or call[name].shape == call["value"].shape[:2],
        "value",
        name,
    )


def _state(name: str, count: Callable[[Call, int], bool], says: str) -> Rule:
    """The state [{says}, heads of value, size of value, size of key]."""
    return that(
        f"{name} [{says}, heads, size of value, size of key]",
        lambda c: (
            c[name].dim() == 4
            and c[name].shape[1:] == (*c["value"].shape[1:], c["key"].shape[2])
            and count(c, c[name].shape[0])
        ),
        "value",
        "key",
        name,
    )


def _within(name: str, low: float, high: float, says: str, strict: bool = False) -> Rule:
    def holds(call: Call) -> bool:
        values = call[name]
        if values is None or values.numel() == 0:
            return True
        least, greatest = float(values.min()), float(values.max())
        return low < least and greatest < high if strict else low <= least and greatest <= high

    return that(says, holds, name)


def _unit(name: str) -> Rule:
    return that(
        f"{name} normalised: rows of norm 1 at most",
        lambda call: float(call[name].float().norm(dim=-1).max()) <= LOOSE,
        name,
    )


def _lengths(low: int, high: float) -> Rule:
    def holds(call: Call) -> bool:
        lengths = call["actual_seq_lengths"].tolist()
        return sum(lengths) == call["query"].shape[0] and all(low <= n <= high for n in lengths)

    bound = f"{low} to {high:g}" if high < float("inf") else f"{low} or more"
    return that(
        f"actual_seq_lengths of {bound} each that sum to the tokens: no prefix sums", holds, "actual_seq_lengths"
    )


def _slots(call: Call) -> bool:
    slots = call["ssm_state_indices"]
    return bool((slots >= 0).all() and (slots < call["state"].shape[0]).all())


def _accepted(call: Call) -> bool:
    accepted = call["num_accepted_tokens"]
    return accepted is None or bool((accepted >= 1).all() and (accepted <= call["actual_seq_lengths"]).all())


def _chunked(call: Call) -> Any:
    return call["value"].new_empty(call["value"].shape, dtype=torch.bfloat16), torch.empty_like(call["initial_state"])


def _recurrent(call: Call) -> Any:
    return call["value"].new_empty(call["value"].shape, dtype=torch.bfloat16)


INPUTS = dtypes("query key value beta g", "bf16/bf16/bf16/bf16/f32")

OPS = (
    VendorOp(
        name="npu_chunk_gated_delta_rule",
        schema="(Tensor query, Tensor key, Tensor value, *, Tensor? beta=None, Tensor? initial_state=None, "
        "Tensor? actual_seq_lengths=None, float? scale=None, Tensor? g=None) -> (Tensor, Tensor)",
        page=PAGES + "torch_npu-npu_chunk_gated_delta_rule.md",
        chips=(A2, A3, A5),
        outputs=_chunked,
        rules=(
            given(
                "beta", "initial_state", "actual_seq_lengths", why="the vendor needs them with [tokens, heads, size]"
            ),
            INPUTS,
            dtypes("initial_state", "bf16", chips=(A2, A3)),
            dtypes("initial_state", "bf16 f32", chips=(A5,)),
            *_heads(64, 128),
            _state("initial_state", lambda c, n: n == c["actual_seq_lengths"].shape[0], "sequences"),
        ),
        value_rules=(
            _lengths(1, float("inf")),
            _within("query", -1.0, 1.0, "query within -1 and 1"),
            _within("key", -1.0, 1.0, "key within -1 and 1"),
            _unit("query"),
            _unit("key"),
            _within(
                "g",
                -1.0,
                0.0,
                "g, the logarithm of what a token keeps, within -1 and 0, below which the page warns of overflow",
            ),
            _within("beta", 0.0, 1.0, "beta between 0 and 1, without either", strict=True),
        ),
        explicit=("beta", "initial_state", "actual_seq_lengths", "scale", "g"),
        note="states are [value, key]; the caller normalises query and key; Qwen3-Next's g is unbounded below",
    ),
    VendorOp(
        name="npu_recurrent_gated_delta_rule",
        schema="(Tensor query, Tensor key, Tensor value, Tensor(a!) state, *, Tensor? beta=None, float? scale=None, "
        "Tensor? actual_seq_lengths=None, Tensor? ssm_state_indices=None, Tensor? num_accepted_tokens=None, "
        "Tensor? g=None, Tensor? gk=None) -> Tensor",
        page=PAGES + "torch_npu-npu_recurrent_gated_delta_rule.md",
        chips=(A2, A3),
        outputs=_recurrent,
        rules=(
            given("actual_seq_lengths", "ssm_state_indices", why="the page does not say what leaving them out means"),
            INPUTS,
            dtypes("state ssm_state_indices num_accepted_tokens gk", "bf16/i32/i32/f32"),
            *_heads(256, 512),
            _state("state", lambda c, n: n >= c["query"].shape[0], "as many blocks as tokens or more"),
            that(
                "ssm_state_indices of one block for each token",
                lambda c: c["ssm_state_indices"].shape == c["query"].shape[:1],
                "ssm_state_indices",
                "query",
            ),
            that(
                "num_accepted_tokens of one number for each sequence",
                lambda c: (
                    c["num_accepted_tokens"] is None or c["num_accepted_tokens"].shape == c["actual_seq_lengths"].shape
                ),
                "num_accepted_tokens",
                "actual_seq_lengths",
            ),
            that(
                "gk [tokens, heads of value, size of key]",
                lambda c: c["gk"] is None or c["gk"].shape == (*c["value"].shape[:2], c["key"].shape[2]),
                "gk",
                "value",
                "key",
            ),
        ),
        value_rules=(
            _lengths(1, 8),
            that("ssm_state_indices that name blocks of state", _slots, "ssm_state_indices", "state"),
            that("num_accepted_tokens of 1 to the sequence's length", _accepted, "num_accepted_tokens"),
        ),
        explicit=("beta", "scale", "actual_seq_lengths", "ssm_state_indices", "g"),
        note="state is written in place, a block per token; it is read at the block of the last accepted token",
    ),
)
