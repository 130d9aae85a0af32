"""The provider's gated delta rule and convolution, which call no operator of the vendor's, and why."""

from __future__ import annotations

import pytest
import torch
from delta_rule_cases import lengths, normal, uniform

from porter.kernels.ascend.catalogue.vendor_op import A2, Call
from porter.kernels.ascend.delta_net import CHUNK, _inverse
from porter.kernels.ascend.emulator.stand_in import Emulator
from porter.kernels.ascend.provider import AscendProvider
from porter.kernels.ascend.vendor import load_torch_npu
from porter.kernels.registry import default_registry

OP = default_registry().op("gated_delta_rule", "chunked")


def real(tokens: int, decay: float, heads: int = 32) -> tuple[torch.Tensor, ...]:
    """Qwen3-Next's own sizes: 16 key heads and 32 value heads of 128; decays from 0 to -`decay` a token."""
    query, key = (normal(1, tokens, heads // 2, 128, seed=s).bfloat16() for s in (1, 2))
    beta = 0.01 + 0.98 * uniform(1, tokens, heads)
    value, state = normal(1, tokens, heads, 128).bfloat16(), normal(1, heads, 128, 128)
    return query, key, value, -decay * uniform(1, tokens, heads, seed=4), beta, state


def bound(*arguments: torch.Tensor) -> float:
    return OP.tolerance.relative(torch.bfloat16, *arguments)


@pytest.mark.parametrize("decay", (0.01, 1.0, 16.0))
@pytest.mark.parametrize(("variant", "tokens"), (("chunked", 2), ("chunked", 67), ("chunked", 130), ("recurrent", 1)))
def test_kernel_keeps_the_ops_bound_at_real_sizes_and_any_decay(
    emulator: Emulator, variant: str, tokens: int, decay: float
) -> None:
    kernel = AscendProvider().implementation("gated_delta_rule", variant, A2)
    assert kernel is not None
    arguments = real(tokens, decay)
    assert kernel.accepts(*arguments) is None
    assert OP.error(kernel.call(*arguments), OP.oracle(*arguments), *arguments) <= bound(*arguments)


def test_long_prompts_are_worked_on_in_stretches(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = AscendProvider().implementation(*OP.key, A2)
    assert kernel is not None
    arguments = real(150, 1.0, heads=2)
    whole_output, whole_state = kernel.call(*arguments)
    monkeypatch.setattr("porter.kernels.ascend.delta_net.SEGMENT", CHUNK)
    output, state = kernel.call(*arguments)
    assert torch.equal(output, whole_output)
    assert torch.equal(state, whole_state)


def test_kernel_calls_no_operator_of_the_vendors(emulator: Emulator) -> None:
    seen: list[Call] = []
    emulator.observers.append(lambda call, result: seen.append(call))
    kernel = AscendProvider().implementation(*OP.key, A2)
    assert kernel is not None
    kernel.call(*real(3, 1.0, heads=2))
    assert not seen
    assert kernel.evidence.rung == "declared"


def test_vendors_operator_rounds_the_state_far_beyond_the_ops_bound(emulator: Emulator) -> None:
    """Why the kernel does not use it: outputs would do, the state is thousands of bounds away."""
    arguments = real(8, 1.0, heads=4)
    query, key, value, decay, beta, state = arguments
    rows = (torch.nn.functional.normalize(x.float(), dim=-1).bfloat16()[0] for x in (query, key))
    output, final = load_torch_npu().npu_chunk_gated_delta_rule(
        *rows,
        value[0],
        beta=beta[0].bfloat16(),
        initial_state=state.transpose(-1, -2).contiguous().bfloat16(),
        actual_seq_lengths=lengths(8),
        scale=128**-0.5,
        g=decay[0],
    )
    exact = OP.oracle(*arguments)
    got = output[None], final.transpose(-1, -2).float()
    assert OP.error((got[0], exact[1].float()), exact, *arguments) <= bound(*arguments)
    assert OP.error((exact[0].bfloat16(), got[1]), exact, *arguments) > 1000 * bound(*arguments)


@pytest.mark.parametrize("strength", (0.0, 0.5, 1.0, 2.0))
def test_inverse_of_a_chunk_does_not_lose_what_cancels(strength: float) -> None:
    """Keys that are all the same: powers of the system reach 1e17, its inverse 1."""
    system = torch.full((2, CHUNK, CHUNK), strength).tril(-1) + normal(2, CHUNK, CHUNK) * 1e-3
    exact = torch.eye(CHUNK, dtype=torch.float64) + system.double().tril(-1)
    wanted = torch.linalg.inv(exact)
    # A backward stable method is off by the condition of the system.
    assert (_inverse(system).double() - wanted).norm() < 2.0**-23 * torch.linalg.cond(exact).max() * wanted.norm()


def test_convolution_of_the_vendor_is_in_no_kernel(emulator: Emulator) -> None:
    seen: list[Call] = []
    emulator.observers.append(lambda call, result: seen.append(call))
    kernel = AscendProvider().implementation("causal_conv1d", "silu", A2)
    op = default_registry().op("causal_conv1d", "silu")
    assert kernel is not None
    arguments = (normal(1, 5, 8192).bfloat16(), normal(8192, 4).bfloat16(), None, normal(1, 8192, 4).bfloat16())
    error = op.error(kernel.call(*arguments), op.oracle(*arguments), *arguments)
    assert error <= op.tolerance.relative(torch.bfloat16, *arguments)
    assert not seen
