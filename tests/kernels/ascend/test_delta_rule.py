"""The gated delta rule of Ascend: the operators' semantics and refusals, and why the Op's kernel is torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, I310P, Call, VendorRefusal
from porter.kernels.ascend.delta_net import CHUNK, _inverse
from porter.kernels.ascend.emulator.stand_in import Emulator, emulated_npu
from porter.kernels.ascend.provider import AscendProvider
from porter.kernels.registry import default_registry


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    with emulated_npu(A2) as active:
        yield active


def npu() -> Any:
    import torch_npu  # type: ignore[import-not-found]

    return torch_npu


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def uniform(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.nn.functional.normalize(normal(*shape, seed=seed), dim=-1).bfloat16()


def lengths(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def whole(counts: tuple[int, ...], key_heads: int, heads: int, size: int, wide: int, **changed: Any) -> dict[str, Any]:
    """Arguments of npu_chunk_gated_delta_rule for sequences of `counts` tokens."""
    tokens = sum(counts)
    call = {
        "query": unit(tokens, key_heads, size, seed=1),
        "key": unit(tokens, key_heads, size, seed=2),
        "value": normal(tokens, heads, wide).bfloat16(),
        "beta": (0.01 + 0.98 * uniform(tokens, heads)).bfloat16(),
        "initial_state": normal(len(counts), heads, wide, size).bfloat16(),
        "actual_seq_lengths": lengths(*counts),
        "scale": size**-0.5,
        "g": -uniform(tokens, heads, seed=3),
    }
    return {name: value for name, value in {**call, **changed}.items() if not isinstance(value, str)}


def decode(counts: tuple[int, ...], key_heads: int, heads: int, size: int, wide: int, **changed: Any) -> dict[str, Any]:
    """Arguments of npu_recurrent_gated_delta_rule: blocks in reverse order, one more than tokens."""
    call = whole(counts, key_heads, heads, size, wide)
    del call["initial_state"]
    tokens = sum(counts)
    call["state"] = normal(tokens + 1, heads, wide, size).bfloat16()
    call["ssm_state_indices"] = torch.arange(tokens, 0, -1, dtype=torch.int32)
    return {name: value for name, value in {**call, **changed}.items() if not isinstance(value, str)}


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
    output, final = npu().npu_chunk_gated_delta_rule(**call)
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
    output = npu().npu_recurrent_gated_delta_rule(**call)
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
    output = npu().npu_recurrent_gated_delta_rule(**call)
    _, wanted = step(call, 1, 0, torch.zeros(16, 16, dtype=torch.float64))
    assert (output[1, 0].double() - wanted).norm() <= 2.0**-7 * wanted.norm()


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
        npu().npu_chunk_gated_delta_rule(**whole((3, 2), 2, 4, 16, 24, **change))
    assert words in str(refused.value)


def test_states_are_in_float32_on_the_950_alone() -> None:
    with emulated_npu(A5):
        state = normal(2, 4, 24, 16)
        _, final = npu().npu_chunk_gated_delta_rule(**whole((3, 2), 2, 4, 16, 24, initial_state=state))
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
        npu().npu_recurrent_gated_delta_rule(**decode((3, 2), 2, 4, 16, 24, **change))
    assert words in str(refused.value)


def test_decode_of_more_than_eight_tokens_is_refused(emulator: Emulator) -> None:
    with pytest.raises(VendorRefusal, match="1 to 8 each"):
        npu().npu_recurrent_gated_delta_rule(**decode((9,), 1, 1, 8, 8))
    npu().npu_recurrent_gated_delta_rule(**decode((8,), 1, 1, 8, 8))


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


def test_vendors_operator_rounds_the_state_far_beyond_the_ops_bound(emulator: Emulator) -> None:
    """Why the kernel does not use it: outputs would do, the state is thousands of bounds away."""
    arguments = real(8, 1.0, heads=4)
    query, key, value, decay, beta, state = arguments
    rows = (torch.nn.functional.normalize(x.float(), dim=-1).bfloat16()[0] for x in (query, key))
    output, final = npu().npu_chunk_gated_delta_rule(
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
