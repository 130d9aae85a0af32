"""The gated delta rule of Ascend, against the page's formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from delta_rule_cases import decode, lengths, uniform, whole

from porter.kernels.ascend.emulator.stand_in import Emulator
from porter.kernels.ascend.vendor import load_torch_npu


def step(call: dict[str, Any], token: int, head: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The page's formula for one head in float64: S (value, key) and o = S (scale q)."""
    shared = call["value"].shape[1] // call["key"].shape[1]
    query, key = (call[n][token, head // shared].double() for n in ("query", "key"))
    strength, value = float(call["beta"][token, head]), call["value"][token, head].double()
    kept = 1.0 if call.get("g") is None else float(call["g"][token, head].double().exp())
    each = torch.eye(len(key), dtype=torch.float64)
    if call.get("gk") is not None:
        each = torch.diag(call["gk"][token, head].double().exp())
    before = kept * state @ each
    state = before @ (torch.eye(len(key)) - strength * torch.outer(key, key)) + strength * torch.outer(value, key)
    return state, state @ (query * call["scale"])


SIZES = (((5,), 1, 1, 1, 1), ((3, 1, 7), 2, 4, 16, 24), ((2, 5), 1, 3, 31, 13), ((3,), 2, 4, 128, 128))


@pytest.mark.parametrize("sizes", SIZES)
def test_whole_sequences_follow_the_formula(emulator: Emulator, sizes: Any) -> None:
    call = whole(*sizes)
    output, final = load_torch_npu().npu_chunk_gated_delta_rule(**call)
    assert (output.dtype, final.dtype) == (torch.bfloat16, torch.bfloat16)
    start = 0
    for sequence, count in enumerate(sizes[0]):
        for head in range(sizes[2]):
            state = call["initial_state"][sequence, head].double()
            for token in range(start, start + count):
                state, wanted = step(call, token, head, state)
                assert (output[token, head].double() - wanted).norm() <= 2.0**-8 * wanted.norm() + 1e-5
            assert (final[sequence, head].double() - state).norm() <= 2.0**-8 * state.norm()
        start += count


@pytest.mark.parametrize("accepted", (None, (2, 1, 3)))
@pytest.mark.parametrize("with_gk", (False, True))
def test_decode_reads_the_accepted_block_and_writes_one_block_a_token(
    emulator: Emulator, accepted: tuple[int, ...] | None, with_gk: bool
) -> None:
    counts = (3, 1, 4)
    extra: dict[str, Any] = {} if accepted is None else {"num_accepted_tokens": lengths(*accepted)}
    if with_gk:
        extra["gk"] = -uniform(8, 4, 16, seed=5)
    call = decode(counts, 2, 4, 16, 24, **extra)
    before = call["state"].clone()
    output = load_torch_npu().npu_recurrent_gated_delta_rule(**call)
    start = 0
    for sequence, count in enumerate(counts):
        first = start + (accepted[sequence] - 1 if accepted else 0)
        for head in range(4):
            state = before[call["ssm_state_indices"][first], head].double()
            for token in range(start, start + count):
                state, wanted = step(call, token, head, state)
                assert (output[token, head].double() - wanted).norm() <= 2.0**-8 * wanted.norm() + 1e-5
                block = call["state"][call["ssm_state_indices"][token], head].double()
                assert (block - state).norm() <= 2.0**-8 * state.norm()
        start += count
    assert torch.equal(call["state"][0], before[0])


def test_decode_has_no_bound_on_what_is_forgotten(emulator: Emulator) -> None:
    call = decode((2,), 1, 2, 16, 16, g=torch.full((2, 2), -40.0))
    output = load_torch_npu().npu_recurrent_gated_delta_rule(**call)
    _, wanted = step(call, 1, 0, torch.zeros(16, 16, dtype=torch.float64))
    assert (output[1, 0].double() - wanted).norm() <= 2.0**-7 * wanted.norm()
