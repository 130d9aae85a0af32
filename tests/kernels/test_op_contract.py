"""How errors are measured, and what a bound is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from porter.kernels.contract import Tolerance, moved_bytes, row_error, upcast
from porter.kernels.registry import default_registry


def test_a_small_row_does_not_hide_behind_a_large_one() -> None:
    oracle = torch.tensor([[1e4, 1e4], [1e-4, 1e-4]], dtype=torch.float64)
    wrong = oracle.clone()
    wrong[1] *= 1.5
    assert row_error(wrong, oracle) == pytest.approx(0.5)
    assert row_error((oracle, wrong), (oracle, oracle)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "candidate",
    [[1.0, math.nan], [1.0, math.inf], [math.nan, math.nan]],
)
def test_values_that_are_not_finite_must_be_where_they_belong(candidate: list[float]) -> None:
    assert row_error(torch.tensor([candidate]), torch.tensor([[1.0, 2.0]])) == math.inf


def test_overflow_of_the_dtype_is_expected_where_the_oracle_is_beyond_it() -> None:
    oracle = torch.tensor([[1e5, -1e5, 1.0]], dtype=torch.float64)
    assert row_error(torch.tensor([[math.inf, -math.inf, 1.0]], dtype=torch.float16), oracle) == 0.0
    assert row_error(torch.tensor([[math.inf, math.inf, 1.0]], dtype=torch.float16), oracle) == math.inf
    assert row_error(torch.tensor([[65504.0, -math.inf, 1.0]], dtype=torch.float16), oracle) == math.inf


def test_rounding_to_subnormal_numbers_is_forgiven() -> None:
    oracle = torch.tensor([[2e-8, 7e-8]], dtype=torch.float64)
    assert row_error(oracle.half(), oracle) == 0.0
    assert row_error(2 * oracle.half() + 6e-8, oracle) > 0.5


def test_shapes_and_integers_must_be_equal() -> None:
    assert row_error(torch.zeros(2, 3), torch.zeros(3, 2)) == math.inf
    assert row_error(torch.tensor([1, 2]), torch.tensor([1, 3])) == math.inf
    assert row_error(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0


def test_a_bound_adds_roundings_and_accumulated_errors() -> None:
    tolerance = Tolerance("a dot product", terms=lambda x: x.shape[-1], roundings=2.0, floor=0.25)
    x = torch.zeros(2, 400)
    assert tolerance.relative(torch.bfloat16, x) == pytest.approx(0.25 + 2 * 2.0**-8 + 20 * 2.0**-24)
    assert tolerance.relative(torch.float64, x) == pytest.approx(0.25 + 22 * 2.0**-53)


def test_upcast_changes_floating_tensors_alone() -> None:
    arguments = torch.ones(2).bfloat16(), torch.ones(2, dtype=torch.int8), torch.ones(2, dtype=torch.bool), 1e-6, None
    wide = upcast(arguments)
    assert [getattr(a, "dtype", a) for a in wide] == [torch.float64, torch.int8, torch.bool, 1e-6, None]
    assert moved_bytes(*arguments) == 4 + 2 + 2


FAULTS: dict[tuple[str, str], Any] = {
    ("rms_norm", "standard"): lambda x, weight, eps: (x, weight, 0.0),
    ("rms_norm", "zero_centered"): lambda x, weight, eps: (x, weight - 1, eps),
    ("swiglu", "standard"): lambda gate_up: (torch.cat(gate_up.chunk(2, -1)[::-1], -1),),
    ("linear", "w8a16"): lambda x, weight, scale, bias: (x, weight, scale.roll(1), bias),
    ("rope", "half"): lambda query, key, cos, sin: (query, key, cos, -sin),
    ("attention", "gqa"): lambda q, k, v, mask, scaling, window: (q, k, v, mask, scaling * 1.1, window),
    ("mla_attention", "absorbed"): lambda n, r, latent, *rest: (n, r.flip(-1), latent, *rest),
    ("indexer", "lightning"): lambda query, key, weights, *rest: (query, key, weights.abs(), *rest),
    ("sparse_mla_attention", "absorbed"): lambda *given: (*given[:5], given[5].roll(1, -2) - 1, *given[6:]),
    ("router", "grouped_sigmoid"): lambda hidden, weight, bias, *rest: (hidden, weight, torch.zeros_like(bias), *rest),
    ("experts", "standard"): lambda hidden, index, weights, *rest: (hidden, index, torch.ones_like(weights), *rest),
    ("sampling", "greedy"): lambda logits: (-logits,),
    ("sampling", "top_k_top_p"): lambda logits, temperature, *rest: (logits, temperature * 1.1, *rest),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key", FAULTS, ids="/".join)
def test_the_cases_and_bounds_catch_a_fault(key: tuple[str, str], dtype: torch.dtype) -> None:
    op = default_registry().op(*key)

    def caught(arguments: Any) -> bool:
        error = op.error(op.reference(*FAULTS[key](*arguments)), op.oracle(*arguments), *arguments)
        return not error <= op.tolerance.relative(dtype, *arguments)

    assert sum(caught(case.arguments) for case in op.inputs(dtype)) >= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bound_of_w8a8_catches_activations_that_were_not_quantized(dtype: torch.dtype) -> None:
    for name in ("linear", "experts"):
        op, unquantized = (default_registry().op(name, variant) for variant in ("w8a8", "w8a16"))
        errors = [
            op.error(unquantized.reference(*case.arguments), op.oracle(*case.arguments), *case.arguments)
            / op.tolerance.relative(dtype, *case.arguments)
            for case in op.inputs(dtype)
        ]
        assert max(errors) > 1.0
