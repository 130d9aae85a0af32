"""Every CPU kernel against float64 on every instruction set that this processor runs."""

from __future__ import annotations

import pytest
import torch

from porter.kernels.contract import Implementation
from porter.kernels.cpu.provider import KERNELS, CpuProvider
from porter.kernels.reference.linear import quantize_per_token
from porter.kernels.registry import default_registry


def kernel(provider: CpuProvider, name: str, variant: str) -> Implementation:
    found = provider.implementation(name, variant)
    assert found is not None
    return found


@pytest.mark.parametrize("key", list(KERNELS), ids="-".join)
def test_within_the_tolerance_of_the_op_on_its_own_cases(provider: CpuProvider, key: tuple[str, str]) -> None:
    op, implementation, accepted = default_registry().op(*key), kernel(provider, *key), 0
    for dtype in (torch.float32, torch.bfloat16):
        for case in op.inputs(dtype):
            if implementation.accepts(*case.arguments) is not None:
                continue
            accepted += 1
            outputs = implementation.call(*case.arguments)
            error = op.error(outputs, op.oracle(*case.arguments), *case.arguments)
            assert error <= op.tolerance.relative(dtype, *case.arguments), f"{case.label} in {dtype}: {error}"
    assert accepted > 10


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 13, 300])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 4096), (67, 33), (131, 1031), (259, 64)])
@pytest.mark.parametrize("threads", [1, 2])
def test_int8_sums_are_exact_for_all_shapes(provider: CpuProvider, rows: int, n: int, k: int, threads: int) -> None:
    """With scales of 1 the float32 output is the integer sum, rounded once."""
    generator = torch.Generator().manual_seed(rows * 1000 + n)
    codes = torch.randint(-127, 128, (rows, k), generator=generator)
    codes[:, 0] = 127  # absmax 127: the scale is 1 and the codes are the values
    weight = torch.randint(-128, 128, (n, k), generator=generator).to(torch.int8)
    expected = (codes.double() @ weight.double().T).float()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        output = kernel(provider, "linear", "w8a8").call(codes.float(), weight, torch.ones(n), None)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("sign", [1, -1])
def test_int8_sums_do_not_saturate(provider: CpuProvider, rows: int, sign: int) -> None:
    """The largest products of one sign: a 16-bit multiply-add would clip them."""
    k = 4096
    weight = torch.full((5, k), 127 * sign, dtype=torch.int8)
    output = kernel(provider, "linear", "w8a8").call(torch.full((rows, k), 127.0), weight, torch.ones(5), None)
    assert torch.equal(output, torch.full((rows, 5), float(sign * 127 * 127 * k)))


def test_int8_sums_at_the_largest_k_do_not_wrap(provider: CpuProvider) -> None:
    k = 132104
    weight = torch.full((3, k), -128, dtype=torch.int8)
    implementation = kernel(provider, "linear", "w8a8")
    x = torch.full((1, k), 127.0)
    assert implementation.accepts(x, weight, torch.ones(3), None) is None
    expected = torch.tensor(-127.0 * 128 * k, dtype=torch.float64).float()
    assert torch.equal(implementation.call(x, weight, torch.ones(3), None), expected.expand(1, 3))
    longer = torch.full((3, k + 1), -128, dtype=torch.int8)
    assert "overflow" in str(implementation.accepts(torch.zeros(1, k + 1), longer, torch.ones(3), None))


def test_activations_quantize_to_the_codes_of_the_reference(provider: CpuProvider) -> None:
    """Weight rows of the identity read the codes back, in both the streaming and the blocked kernel."""
    for rows in (1, 40):
        x = torch.randn(rows, 77, generator=torch.Generator().manual_seed(rows)) * 3
        codes, scale = quantize_per_token(x)
        output = kernel(provider, "linear", "w8a8").call(x, torch.eye(77, dtype=torch.int8), torch.ones(77), None)
        assert torch.equal(output, codes.float() * scale)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_keeps_infinities_and_nans_in_their_places(
    provider: CpuProvider, rows: int, dtype: torch.dtype
) -> None:
    x = torch.ones(rows, 70, dtype=dtype)
    weight = torch.ones(6, 70, dtype=dtype)
    weight[1, 69], weight[3, 0] = torch.inf, torch.nan
    output = kernel(provider, "linear", "standard").call(x, weight, None)
    assert torch.equal(output[:, [0, 2, 4, 5]], torch.full((rows, 4), 70.0, dtype=dtype))
    assert bool((output[:, 1] == torch.inf).all()) and bool(output[:, 3].isnan().all())


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_int8_cannot_hold_give_nan_and_spoil_no_other(
    provider: CpuProvider, rows: int, dtype: torch.dtype, bad: float
) -> None:
    """Wherever the value stands: also before the vectors that end the row."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randint(-127, 128, (7, 100), generator=generator).to(torch.int8)
    for place in (0, 17, 63, 99):
        x = torch.randn(rows, 100, generator=generator).to(dtype)
        clean = kernel(provider, "linear", "w8a8").call(x, weight, torch.ones(7), None)
        x[0, place] = bad
        output = kernel(provider, "linear", "w8a8").call(x, weight, torch.ones(7), None)
        assert bool(output[0].isnan().all()) and torch.equal(output[1:], clean[1:])


def test_bfloat16_rounds_half_to_even(provider: CpuProvider) -> None:
    """1 + 2^-8 lies between 1 and 1 + 2^-7; 1 + 3 * 2^-8 between 1 + 2^-7 and 1 + 2^-6."""
    x = torch.tensor([[1.0, 1.0, 2.0**-8], [1.0, 1.0 + 2.0**-7, 2.0**-8]], dtype=torch.bfloat16)[:, 1:]
    weight = torch.ones(1, 2, dtype=torch.bfloat16)
    output = kernel(provider, "linear", "standard").call(x, weight, None)
    assert output.flatten().tolist() == [1.0, 1.0 + 2.0**-6]


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("window", [None, 5, 300])
def test_decode_over_a_long_cache_split_over_threads(provider: CpuProvider, keys: int, window: int | None) -> None:
    op = default_registry().op("attention", "gqa")
    generator = torch.Generator().manual_seed(keys)
    query = torch.randn(1, 9, 1, 64, generator=generator)
    cache = torch.randn(2, 1, 3, 1024, 64, generator=generator)
    arguments = (query, cache[0, :, :, :keys], cache[1, :, :, :keys], None, 0.125, window)
    error = op.error(kernel(provider, "attention", "gqa").call(*arguments), op.oracle(*arguments))
    assert error <= op.tolerance.relative(torch.float32, *arguments)


def test_attention_ignores_what_lies_behind_the_mask(provider: CpuProvider) -> None:
    """Slots of a static cache that were never written do not count, however large they are."""
    query, cache = torch.randn(1, 2, 1, 16), torch.randn(2, 1, 2, 20, 16)
    mask = (torch.arange(20) < 7)[None, None, None]
    clean = kernel(provider, "attention", "gqa").call(query, cache[0], cache[1], mask, 0.25, None)
    cache[:, :, :, 7:] = 1e30
    assert torch.equal(kernel(provider, "attention", "gqa").call(query, cache[0], cache[1], mask, 0.25, None), clean)


@pytest.mark.parametrize("tokens", [1, 3, 60])
@pytest.mark.parametrize("variant", ["standard", "w8a16", "w8a8"])
def test_experts_agree_between_few_and_many_tokens(provider: CpuProvider, variant: str, tokens: int) -> None:
    """A token's result does not depend on who shares its experts; both regimes against the oracle."""
    op = default_registry().op("experts", variant)
    generator = torch.Generator().manual_seed(tokens)
    hidden, size, experts = 72, 40, 5
    index = torch.stack([torch.randperm(experts, generator=generator)[:3] for _ in range(tokens)])
    x, weights = torch.randn(tokens, hidden, generator=generator), torch.rand(tokens, 3, generator=generator)
    shapes = (experts, 2 * size, hidden), (experts, hidden, size)
    if variant == "standard":
        stacked = [torch.randn(*shape, generator=generator) * shape[-1] ** -0.5 for shape in shapes]
    else:
        stacked = []
        for shape in shapes:
            stacked.append(torch.randint(-127, 128, shape, generator=generator).to(torch.int8))
            stacked.append(torch.rand(shape[:2], generator=generator) * 0.01)
    arguments = (x, index, weights, *stacked)
    error = op.error(kernel(provider, "experts", variant).call(*arguments), op.oracle(*arguments))
    assert error <= op.tolerance.relative(torch.float32, *arguments)


def test_views_of_a_fused_projection_need_no_copy(provider: CpuProvider) -> None:
    """q_norm on a slice of qkv: rows lie apart, the result is that of the copy."""
    qkv = torch.randn(3, 1, 7 * 16)
    heads = qkv[..., : 4 * 16].view(3, 1, 4, 16)
    weight = torch.rand(16)
    implementation = kernel(provider, "rms_norm", "standard")
    assert torch.equal(implementation.call(heads, weight, 1e-6), implementation.call(heads.contiguous(), weight, 1e-6))


def test_refusals_name_the_reason(provider: CpuProvider) -> None:
    accepts = kernel(provider, "rms_norm", "standard").accepts
    assert "bfloat16" in str(accepts(torch.ones(2, 4), torch.ones(4, dtype=torch.float16), 1e-6))
    assert "float32" in str(accepts(torch.ones(2, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64), 1e-6))
    assert "empty" in str(accepts(torch.ones(0, 4), torch.ones(4), 1e-6))
