"""Ascend's short convolution, against its page's formula in float64, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from delta_rule_cases import lengths, normal

from porter.kernels.ascend.catalogue.vendor_op import A2, A5, VendorRefusal
from porter.kernels.ascend.emulator.stand_in import Emulator, emulated_npu
from porter.kernels.ascend.vendor import load_torch_npu

COUNTS = (5, 1, 3)
STARTS = lengths(0, 5, 6, 9)


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with emulated_npu(A5) as active:
        yield active


def call(**changed: Any) -> dict[str, Any]:
    arguments = {
        "x": normal(9, 64).bfloat16(),
        "weight": normal(3, 64).bfloat16(),
        "conv_states": normal(5, 4, 64).bfloat16(),
        "query_start_loc": STARTS,
        "cache_indices": lengths(4, 0, 2),
        "num_computed_tokens": lengths(7, 3, 9),
        "residual_connection": 0,
    }
    return {name: value for name, value in {**arguments, **changed}.items() if value is not ...}


@pytest.mark.parametrize("residual", (0, 1))
@pytest.mark.parametrize("accepted", (None, (3, 1, 2)))
def test_convolution_continues_each_sequence(
    emulator: Emulator, accepted: tuple[int, ...] | None, residual: int
) -> None:
    arguments = call(residual_connection=residual, num_computed_tokens=lengths(7, 3, 0))
    if accepted:
        arguments["num_accepted_tokens"] = lengths(*accepted)
    before = arguments["conv_states"].clone()
    output = load_torch_npu().npu_fused_causal_conv1d(**arguments)
    for i, count in enumerate(COUNTS):
        line, start = int(arguments["cache_indices"][i]), int(STARTS[i])
        shown = 4 if accepted is None else accepted[i] + 1
        past = torch.zeros(2, 64, dtype=torch.bfloat16) if i == 2 else before[line, :shown]
        inputs = torch.cat((past, arguments["x"][start : start + count])).double()
        for token in range(count):
            window = inputs[len(past) + token - 2 : len(past) + token + 1]
            wanted = (window * arguments["weight"].double()).sum(0) + residual * inputs[len(past) + token]
            assert (output[start + token].double() - wanted).norm() <= 2.0**-8 * wanted.norm()
        kept = min(4, len(inputs))
        assert torch.equal(arguments["conv_states"][line, 4 - kept :].double(), inputs[-kept:])
    assert torch.equal(arguments["conv_states"][1], before[1])


def test_sequence_without_a_line_is_left_out(emulator: Emulator) -> None:
    arguments = call(cache_indices=lengths(4, -1, 2))
    output = load_torch_npu().npu_fused_causal_conv1d(**arguments)
    assert output[5].isnan().all()
    assert output[:5].isfinite().all()


REFUSALS: tuple[tuple[str, dict[str, Any], str], ...] = (
    (A2, {}, "is not documented for ascend-910b"),
    (A5, {"weight": normal(4, 64).bfloat16()}, "weight [3, channels], taps before channels"),
    (A5, {"weight": normal(64, 3).bfloat16()}, "weight [3, channels], taps before channels"),
    (A5, {"bias": normal(64).bfloat16()}, "no bias or initial_state_mode, which this operator takes and ignores"),
    (A5, {"activation": "silu"}, "no activation, which this operator takes and ignores"),
    (A5, {"conv_mode": "pangu"}, "conv_mode to be one of 'default'"),
    (A5, {"x": normal(9, 40).bfloat16()}, "weight [3, channels]"),
    (A5, {"conv_states": normal(5, 64, 4).bfloat16()}, "time before channels"),
    (A5, {"conv_states": normal(2, 4, 64).bfloat16()}, "a line of conv_states for each sequence"),
    (A5, {"conv_states": normal(5, 4, 64)}, "x / weight / conv_states as"),
    (A5, {"cache_indices": lengths(4, 4, 2)}, "each once"),
    (A5, {"query_start_loc": lengths(5, 1, 3)}, "one number for each"),
    (A5, {"query_start_loc": lengths(0, 5, 6, 8)}, "to rise from 0 to the number of tokens"),
    (A5, {"query_start_loc": ...}, "query_start_loc is left out"),
    (A5, {"num_accepted_tokens": lengths(1, 2, 1)}, "num_accepted_tokens of 1 to the sequence's length"),
    (A5, {"initial_state_idx": lengths(0, 0, 0)}, "which keep states of prefixes"),
)


@pytest.mark.parametrize(("chip", "changed", "words"), REFUSALS, ids=[r[2] for r in REFUSALS])
def test_convolution_refuses(chip: str, changed: dict[str, Any], words: str) -> None:
    with emulated_npu(chip), pytest.raises(VendorRefusal) as refused:
        load_torch_npu().npu_fused_causal_conv1d(**call(**changed))
    assert words in str(refused.value)
