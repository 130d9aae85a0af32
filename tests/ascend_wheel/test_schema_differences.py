"""The comparison of schemas finds each kind of difference, and only those."""

from __future__ import annotations

import pytest

from benchmarks.torch_npu_wheel.schemas import differences
from porter.kernels.ascend.catalogue.table import catalogue

ARGUMENTS = "Tensor(a!) x, Tensor? y=None, *, float eps=1e-06, int[3] sizes, ScalarType? dtype=None"
WHEEL = f"npu::op({ARGUMENTS}) -> (Tensor, Tensor)"


@pytest.mark.parametrize("op", catalogue().values(), ids=lambda op: op.name)
def test_schemas_of_the_catalogue_equal_themselves(op: object) -> None:
    text = f"npu::{op.name}{op.schema}"  # type: ignore[attr-defined]
    assert differences(text, text) == []


@pytest.mark.parametrize(
    ("wanted", "planted", "told"),
    [
        ("Tensor? y=None", "Tensor y", "y: type is Tensor; the wheel has Optional[Tensor]"),
        ("eps=1e-06", "eps=1e-05", "eps: default is 1e-05; the wheel has 1e-06"),
        ("Tensor(a!) x", "Tensor x", "x: alias is none; the wheel has a!"),
        ("Tensor(a!) x", "Tensor(a) x", "x: alias is a; the wheel has a!"),
        ("*, float eps", "float eps", "eps: keyword-only is False; the wheel has True"),
        ("int[3] sizes", "int[2] sizes", "sizes: type is List[int](2); the wheel has List[int](3)"),
        ("ScalarType? dtype", "int? dtype", "dtype: type is Optional[int]; the wheel has Optional[ScalarType]"),
        ("(Tensor, Tensor)", "Tensor", "results are [('Tensor', 'none')]; the wheel has"),
        ("Tensor? y=None, ", "", "arguments are x, eps, sizes, dtype; the wheel has x, y, eps, sizes, dtype"),
        (" eps", " epsilon", "arguments are x, y, epsilon, sizes, dtype; the wheel has x, y, eps, sizes, dtype"),
    ],
)
def test_each_kind_of_difference_is_told(wanted: str, planted: str, told: str) -> None:
    assert wanted in WHEEL
    found = differences(WHEEL.replace(wanted, planted), WHEEL)
    assert any(line.startswith(told) for line in found), found


def test_numbers_written_otherwise_are_equal() -> None:
    assert differences(WHEEL.replace("1e-06", "9.9999999999999995e-07"), WHEEL) == []
