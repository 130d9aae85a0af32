"""The short convolution of linear attention. Kernels of 3 alone: Qwen3-Next's have 4, so that no kernel uses it."""

from __future__ import annotations

from typing import Any

import torch

from porter.kernels.ascend.catalogue.rules import absent, contiguous, dtypes, given, one_of, rank, size, that
from porter.kernels.ascend.catalogue.vendor_op import A5, PAGES, Call, VendorOp

IGNORED = "this operator takes and ignores"
BLOCKS = ("block_idx_first_scheduled_token", "block_idx_last_scheduled_token", "initial_state_idx")


def _outputs(call: Call) -> Any:
    return call["x"].new_empty(call["x"].shape)


def _starts(call: Call) -> bool:
    starts: list[int] = call["query_start_loc"].tolist()
    return starts == sorted(starts) and starts[0] == 0 and starts[-1] == call["x"].shape[0]


def _lines(call: Call) -> bool:
    lines = call["cache_indices"]
    if lines is None:
        return True
    used = lines[lines != call["pad_slot_id"]].tolist()
    return len(set(used)) == len(used) and all(0 <= line < call["conv_states"].shape[0] for line in used)


def _accepted(call: Call) -> bool:
    accepted, lengths = call["num_accepted_tokens"], call["query_start_loc"].diff()
    return accepted is None or bool((accepted >= 1).all() and (accepted <= lengths.clamp_min(1)).all())


def _per_sequence(call: Call) -> bool:
    batch = call["query_start_loc"].shape[0] - 1
    names = ("cache_indices", "num_accepted_tokens", "num_computed_tokens")
    return 1 <= batch <= 256 and all(call[n] is None or call[n].shape == (batch,) for n in names)


OPS = (
    VendorOp(
        name="npu_fused_causal_conv1d",
        schema="(Tensor x, Tensor weight, Tensor(a!) conv_states, *, Tensor? query_start_loc=None, "
        "Tensor? cache_indices=None, Tensor? initial_state_mode=None, Tensor? bias=None, "
        "Tensor? num_accepted_tokens=None, str? activation='None', int? pad_slot_id=-1, int? run_mode=0, "
        "int? residual_connection=0, int? max_query_len=-1, Tensor? num_computed_tokens=None, "
        "Tensor? block_idx_first_scheduled_token=None, Tensor? block_idx_last_scheduled_token=None, "
        "Tensor? initial_state_idx=None, int? block_size=128, str? conv_mode='default') -> Tensor",
        page=PAGES + "torch_npu-npu_fused_causal_conv1d.md",
        chips=(A5,),
        outputs=_outputs,
        rules=(
            absent("bias", "initial_state_mode", why=IGNORED),
            that(f"no activation, which {IGNORED}", lambda c: c["activation"] in (None, "None"), "activation"),
            absent(*BLOCKS, why="keep states of prefixes, which porter does not model"),
            one_of("conv_mode", "default"),
            one_of("residual_connection", 0, 1),
            rank("x", 2),
            given("query_start_loc", why="x of two dimensions has sequences one after the other"),
            dtypes("x weight conv_states", "bf16/bf16/bf16 f16/f16/f16"),
            dtypes("query_start_loc cache_indices num_accepted_tokens num_computed_tokens", "i32/i32/i32/i32"),
            contiguous("weight", "query_start_loc", "cache_indices", "num_accepted_tokens", "num_computed_tokens"),
            that(
                "weight [3, channels], taps before channels",
                lambda c: c["weight"].shape == (3, c["x"].shape[1]),
                "weight",
                "x",
            ),
            that(
                "conv_states [lines, 2 or more, channels], time before channels",
                lambda c: (
                    c["conv_states"].dim() == 3
                    and c["conv_states"].shape[1] >= 2
                    and c["conv_states"].shape[2] == c["x"].shape[1]
                ),
                "conv_states",
                "x",
            ),
            that("one number for each of 1 to 256 sequences", _per_sequence, "query_start_loc", "cache_indices"),
            that(
                "a line of conv_states for each sequence or more",
                lambda c: c["conv_states"].shape[0] >= c["query_start_loc"].shape[0] - 1,
                "conv_states",
                "query_start_loc",
            ),
            size("x", 1, "a multiple of 16 from 64 to 16384", lambda n: n % 16 == 0 and 64 <= n <= 16384),
            size("x", 0, "of 1 to 1048576 tokens", lambda n: 1 <= n <= 2**20),
        ),
        value_rules=(
            that("query_start_loc to rise from 0 to the number of tokens", _starts, "query_start_loc", "x"),
            that("cache_indices of lines that exist, each once", _lines, "cache_indices", "conv_states"),
            that("num_accepted_tokens of 1 to the sequence's length", _accepted, "num_accepted_tokens"),
            that("x without infinities or NaN", lambda c: bool(torch.isfinite(c["x"]).all()), "x"),
        ),
        explicit=("query_start_loc", "num_computed_tokens", "residual_connection"),
        note="no bias and no silu; a sequence whose num_computed_tokens is 0 starts from zeros",
    ),
)
