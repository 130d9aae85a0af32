"""The Ops of gated delta nets against transformers and against themselves, in float64; faults that must show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_cases import assert_same, cases, reference
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from porter.kernels.cpu.provider import CpuProvider
from porter.kernels.registry import default_registry
from porter.precision import float64_mode

RULES = ("chunked", "recurrent")


def rule_arguments(tokens: int, batch: int = 2, **changes: Any) -> list[Any]:
    """Random (query, key, value, decay, beta, state) of 2 key heads and 4 value heads."""
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    decay, beta = -0.2 * draw(batch, tokens, 4).abs(), draw(batch, tokens, 4).sigmoid()
    heads = (draw(batch, tokens, 2, 12), draw(batch, tokens, 2, 12), draw(batch, tokens, 4, 10))
    named = dict(zip(("query", "key", "value"), heads, strict=True))
    return list({**named, "decay": decay, "beta": beta, "state": draw(batch, 4, 12, 10), **changes}.values())


@pytest.mark.parametrize("variant", RULES)
def test_delta_rule_is_upstreams(variant: str) -> None:
    upstream = getattr(qwen3_next, f"torch_{'chunk' if variant == 'chunked' else 'recurrent'}_gated_delta_rule")
    for case in cases("gated_delta_rule", variant):
        if case.arguments[2].numel() == 0:
            continue  # upstream reshapes to -1, which no empty tensor can be
        query, key, value, decay, beta, state = case.arguments
        with float64_mode():
            theirs = upstream(
                query, key, value, g=decay, beta=beta, initial_state=state, output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
        for ours, other in zip(reference("gated_delta_rule", variant, *case.arguments), theirs, strict=True):
            assert_same(ours, other)


@pytest.mark.parametrize("split", [1, 13, 63, 64, 65, 100])
@pytest.mark.parametrize("variant", RULES)
def test_states_carry_over_from_piece_to_piece(variant: str, split: int) -> None:
    arguments = rule_arguments(130)
    whole, last = reference("gated_delta_rule", variant, *arguments)
    first, state = reference("gated_delta_rule", variant, *(a[:, :split] for a in arguments[:5]), arguments[5])
    second, state = reference("gated_delta_rule", variant, *(a[:, split:] for a in arguments[:5]), state)
    assert_same(torch.cat((first, second), dim=1), whole)
    assert_same(state, last)


def test_tokens_that_write_and_forget_nothing_leave_the_state_as_it_was() -> None:
    """What left padding relies on: masked hidden states give beta and decay, but keys and values of zero."""
    arguments = rule_arguments(9)
    for variant in RULES:
        zeros = [torch.zeros_like(a) for a in arguments[:3]]
        _, state = reference("gated_delta_rule", variant, *zeros, arguments[3] * 0, *arguments[4:])
        assert_same(state, arguments[5])


def test_a_convolution_is_upstreams_at_once_and_step_by_step() -> None:
    for case in cases("causal_conv1d", "silu"):
        hidden_states, weight, bias, state = case.arguments
        new = hidden_states.transpose(1, 2)
        if state is None:
            state = new.new_zeros(*new.shape[:2], weight.shape[1])
        theirs = qwen3_next.causal_conv1d_fn(torch.cat((state, new), dim=-1), weight, bias, activation="silu")
        theirs = theirs[..., state.shape[-1] :].transpose(1, 2)
        output, last = reference("causal_conv1d", "silu", *case.arguments)
        assert_same(output, theirs)
        for t in range(hidden_states.shape[1]):
            step = qwen3_next.causal_conv1d_update(new[..., t : t + 1], state := state.clone(), weight, bias, "silu")
            assert_same(output[:, t], step[..., 0])
        assert_same(last, state)


def test_gates_are_upstreams() -> None:
    for case in cases("delta_gates", "softplus"):
        a, b, rates, time_bias, scale = case.arguments
        decay, beta = reference("delta_gates", "softplus", *case.arguments)
        assert_same(decay, -rates.exp() * torch.nn.functional.softplus(a.flatten(2) + time_bias))
        assert_same(beta, scale * b.flatten(2).sigmoid())


def test_a_sigmoid_gate_is_the_product() -> None:
    for case in cases("sigmoid_gate", "standard"):
        hidden_states, gate = case.arguments
        assert_same(reference("sigmoid_gate", "standard", *case.arguments), hidden_states * gate.sigmoid())


def rounded_state(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence with its state kept in bfloat16."""
    outputs, state = [], arguments[5]
    for t in range(arguments[2].shape[1]):
        piece = (a[:, t : t + 1] for a in arguments[:5])
        output, state = reference("gated_delta_rule", "recurrent", *piece, state)
        state = state.bfloat16().to(state.dtype)
        outputs.append(output)
    return torch.cat(outputs, dim=1), state


FAULTS: dict[str, tuple[tuple[str, str], Any]] = {
    "state in bfloat16": (("gated_delta_rule", "recurrent"), rounded_state),
    "state forgotten": (
        ("gated_delta_rule", "chunked"),
        lambda q, k, v, g, b, s: reference("gated_delta_rule", "chunked", q, k, v, g, b, None),
    ),
    "decay after the update": (
        ("gated_delta_rule", "recurrent"),
        lambda q, k, v, g, b, s: reference("gated_delta_rule", "recurrent", q, k, v, g.roll(1, 1), b, s),
    ),
    "key heads interleaved": (
        ("gated_delta_rule", "chunked"),
        lambda q, k, v, g, b, s: reference("gated_delta_rule", "chunked", q.flip(2), k.flip(2), v, g, b, s),
    ),
    "convolution one step late": (
        ("causal_conv1d", "silu"),
        lambda x, w, b, s: reference("causal_conv1d", "silu", x, w.roll(1, 1), b, s),
    ),
    "beta not scaled": (
        ("delta_gates", "softplus"),
        lambda a, b, rates, bias, scale: reference("delta_gates", "softplus", a, b, rates, bias, 1.0),
    ),
    "gate without sigmoid": (("sigmoid_gate", "standard"), lambda x, gate: x * gate),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAULTS)
def test_the_cases_and_bounds_catch_a_fault(name: str, dtype: torch.dtype) -> None:
    key, faulty = FAULTS[name]
    op = default_registry().op(*key)
    bounds = ((op.tolerance.relative(dtype, *c.arguments), c.arguments) for c in op.inputs(dtype))
    assert any(
        not op.error(faulty(*arguments), op.oracle(*arguments), *arguments) <= bound
        for bound, arguments in bounds
        if arguments[0].numel()
    )


def test_a_thousand_steps_of_the_kernel_stay_within_float32() -> None:
    """The state's error does not grow with the number of steps: each step's rounding decays with what it rounds."""
    provider = CpuProvider()
    assert provider.library.load() is None
    kernel = provider.implementation("gated_delta_rule", "recurrent")
    assert kernel is not None
    arguments = rule_arguments(1000, batch=1, state=None)
    exact, last = reference("gated_delta_rule", "recurrent", *arguments)
    narrow, state = [a.float() for a in arguments[:5]], torch.zeros(1, 4, 12, 10)
    errors = []
    for t in range(1000):
        piece = [a[:, t : t + 1] for a in narrow]
        output, state = kernel.call(*piece, state)
        errors.append(float((output.double() - exact[:, t : t + 1]).norm() / exact[:, t : t + 1].norm()))
    # The inputs were rounded to float32 too; the last hundred steps are no worse than the first.
    assert max(errors) < 2e-5 and max(errors[-100:]) < 3 * max(errors[:100])
    assert float((state.double() - last).norm() / last.norm()) < 2e-6


BAD = torch.zeros(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("key", "arguments"),
    [
        (("gated_delta_rule", "chunked"), (BAD, BAD, BAD[..., 0], BAD[..., 0], BAD[..., 0], None)),
        (("gated_delta_rule", "chunked"), (BAD, BAD, BAD, BAD[..., :3, 0], BAD[..., 0], None)),
        (("gated_delta_rule", "recurrent"), (BAD, BAD[:, :2], BAD, BAD[..., 0], BAD[..., 0], None)),
        (("gated_delta_rule", "recurrent"), (BAD, BAD, BAD, BAD[..., 0], BAD[..., 0], BAD)),
        (("gated_delta_rule", "recurrent"), (BAD, BAD, BAD[:, :, :3], BAD[..., :3, 0], BAD[..., :3, 0], None)),
        (("causal_conv1d", "silu"), (BAD[0], BAD[0, :, :, 0], None, None)),
        (("causal_conv1d", "silu"), (BAD[0], torch.zeros(5, 4), torch.zeros(4), None)),
        (("causal_conv1d", "silu"), (BAD[0], torch.zeros(5, 4), None, torch.zeros(3, 5, 3))),
        (("delta_gates", "softplus"), (BAD[0], BAD[0], torch.zeros(20), torch.zeros(20), 1.0)),
        (("delta_gates", "softplus"), (BAD, BAD, torch.zeros(19), torch.zeros(20), 1.0)),
        (("sigmoid_gate", "standard"), (BAD, BAD[:1])),
        (("sigmoid_gate", "standard"), (BAD, BAD[..., :2])),
    ],
)
def test_shapes_that_do_not_fit_are_refused(key: tuple[str, str], arguments: tuple[Any, ...]) -> None:
    kernel = CpuProvider().implementation(*key)
    assert kernel is not None and kernel.accepts(*arguments)
