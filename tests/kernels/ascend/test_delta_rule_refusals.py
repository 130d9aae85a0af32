"""What the gated delta rule of Ascend refuses, in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from delta_rule_cases import decode, lengths, normal, uniform, unit, whole

from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, I310P, VendorRefusal
from porter.kernels.ascend.emulator.stand_in import Emulator, emulated_npu
from porter.kernels.ascend.vendor import load_torch_npu


def changed(maker: Any, name: str, change: Any) -> dict[str, Any]:
    return {name: change(maker((3, 2), 2, 4, 16, 24)[name])}


WHOLE_REFUSALS: tuple[tuple[str, dict[str, Any], str], ...] = (
    (A2, changed(whole, "g", lambda g: g * 3), "g, the logarithm of what a token keeps, within -1 and 0"),
    (A2, changed(whole, "g", lambda g: -g), "within -1 and 0"),
    (A2, changed(whole, "beta", lambda b: b * 2), "beta between 0 and 1"),
    (A2, changed(whole, "beta", lambda b: b * 0), "beta between 0 and 1"),
    (A2, changed(whole, "beta", lambda b: b.float()), "query / key / value / beta / g as bf16/bf16/bf16/bf16/f32"),
    (A2, changed(whole, "g", lambda g: g.bfloat16()), "as bf16/bf16/bf16/bf16/f32"),
    (A2, changed(whole, "key", lambda k: k * 2), "key within -1 and 1"),
    (A2, {"key": torch.full((5, 2, 16), 0.9).bfloat16()}, "key normalised"),
    (A2, {"query": torch.full((5, 2, 16), 0.9).bfloat16()}, "query normalised"),
    (A2, {"initial_state": normal(2, 4, 24, 16)}, "initial_state as bf16"),
    (A3, {"initial_state": normal(2, 4, 24, 16)}, "initial_state as bf16"),
    (
        A2,
        {"initial_state": normal(2, 4, 16, 24).bfloat16()},
        "initial_state [sequences, heads, size of value, size of key]",
    ),
    (
        A2,
        {"initial_state": normal(3, 4, 24, 16).bfloat16()},
        "initial_state [sequences, heads, size of value, size of key]",
    ),
    (A2, {"actual_seq_lengths": lengths(3, 5)}, "no prefix sums"),
    (A2, {"actual_seq_lengths": lengths(5, 0)}, "1 or more each"),
    (A2, {"actual_seq_lengths": torch.tensor([3, 2])}, "actual_seq_lengths as i32"),
    (A2, {"actual_seq_lengths": None}, "the vendor needs them"),
    (A2, {"beta": None}, "the vendor needs them"),
    (A2, {"scale": None}, "scale: the vendor's code refuses None"),
    (A2, {"scale": "left out"}, "scale is left out"),
    (A2, {"g": "left out"}, "g is left out"),
    (A2, {"query": unit(5, 4, 16)}, "key [tokens, heads, size] of query's shape"),
    (A2, {"query": unit(5, 3, 16), "key": unit(5, 3, 16)}, "a multiple of its heads"),
    (A2, {"query": unit(1, 5, 2, 16)}, "query of 3 dimensions"),
    (A2, {"g": -uniform(5, 2)}, "g [tokens, heads of value]"),
    (A2, {"query": unit(5, 2, 160), "key": unit(5, 2, 160)}, "64 heads and 128 dimensions at most"),
    (I310P, {}, "is not documented for ascend-310p"),
)


@pytest.mark.parametrize(("chip", "change", "words"), WHOLE_REFUSALS, ids=[r[2] for r in WHOLE_REFUSALS])
def test_whole_sequences_are_refused(chip: str, change: dict[str, Any], words: str) -> None:
    with emulated_npu(chip), pytest.raises(VendorRefusal) as refused:
        load_torch_npu().npu_chunk_gated_delta_rule(**whole((3, 2), 2, 4, 16, 24, **change))
    assert words in str(refused.value)


def test_states_are_in_float32_on_the_950_alone() -> None:
    with emulated_npu(A5):
        state = normal(2, 4, 24, 16)
        _, final = load_torch_npu().npu_chunk_gated_delta_rule(**whole((3, 2), 2, 4, 16, 24, initial_state=state))
    assert final.dtype == torch.float32


DECODE_REFUSALS: tuple[tuple[str, dict[str, Any], str], ...] = (
    (A5, {}, "is not documented for ascend-950"),
    (A2, {"state": normal(6, 4, 24, 16)}, "as bf16/i32/i32/f32"),
    (A2, {"state": normal(6, 4, 16, 24).bfloat16()}, "state [as many blocks as tokens or more, heads, size of value"),
    (A2, {"state": normal(4, 4, 24, 16).bfloat16()}, "state [as many blocks as tokens or more"),
    (A2, {"ssm_state_indices": lengths(0, 1)}, "one block for each token"),
    (A2, {"ssm_state_indices": lengths(0, 1, 2, 3, 6)}, "that name blocks of state"),
    (A2, {"ssm_state_indices": None}, "does not say what leaving them out means"),
    (A2, {"num_accepted_tokens": lengths(0, 1)}, "num_accepted_tokens of 1 to the sequence's length"),
    (A2, {"num_accepted_tokens": lengths(1, 3)}, "num_accepted_tokens of 1 to the sequence's length"),
    (A2, {"num_accepted_tokens": lengths(1)}, "one number for each sequence"),
    (A2, {"actual_seq_lengths": lengths(3, 5)}, "no prefix sums"),
    (A2, {"gk": -uniform(5, 4)}, "gk [tokens, heads of value, size of key]"),
    (A2, {"scale": None}, "scale: the vendor's code refuses None"),
    (A2, {"beta": "left out"}, "beta is left out"),
    (A2, {"ssm_state_indices": "left out"}, "ssm_state_indices is left out"),
)


@pytest.mark.parametrize(("chip", "change", "words"), DECODE_REFUSALS, ids=[r[2] for r in DECODE_REFUSALS])
def test_decode_is_refused(chip: str, change: dict[str, Any], words: str) -> None:
    with emulated_npu(chip), pytest.raises(VendorRefusal) as refused:
        load_torch_npu().npu_recurrent_gated_delta_rule(**decode((3, 2), 2, 4, 16, 24, **change))
    assert words in str(refused.value)


def test_decode_of_more_than_eight_tokens_is_refused(emulator: Emulator) -> None:
    with pytest.raises(VendorRefusal, match="1 to 8 each"):
        load_torch_npu().npu_recurrent_gated_delta_rule(**decode((9,), 1, 1, 8, 8))
    load_torch_npu().npu_recurrent_gated_delta_rule(**decode((8,), 1, 1, 8, 8))
