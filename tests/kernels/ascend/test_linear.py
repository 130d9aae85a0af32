"""The linear Ops as calls of torch_npu: the calls that they make, what is refused, and what naive calls get wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, I310P
from porter.kernels.ascend.emulator.stand_in import Emulator
from porter.kernels.ascend.linear import linear_w8a8, linear_w8a8_static, linear_w8a16
from porter.kernels.ascend.provider import AscendProvider
from porter.kernels.reference.draw import Draw
from porter.kernels.reference.linear_static import offset_correction
from porter.kernels.registry import default_registry

BF16, F16 = torch.bfloat16, torch.float16


def int8_arguments(dtype: torch.dtype = BF16, rows: int = 5) -> tuple[torch.Tensor, ...]:
    draw = Draw(dtype, 7)
    weight, scale = draw.int8_weight(24, 96)
    return draw.normal(2, rows, 96), weight, scale


def static_arguments(dtype: torch.dtype = BF16) -> tuple[torch.Tensor, ...]:
    x, weight, scale = int8_arguments(dtype)
    offset = torch.tensor([-31], dtype=torch.int8)
    return x, weight, scale, torch.tensor([0.03]), offset, offset_correction(weight, offset)


def vendor_calls(variant: str, arguments: tuple[Any, ...], chip: str = A2) -> tuple[str | None, list[Any]]:
    refused, calls = AscendProvider().calls("linear", variant, chip, arguments)
    return refused, list(calls)


def test_w8a8_quantizes_rows_and_passes_every_dtype() -> None:
    refused, calls = vendor_calls("w8a8", (*int8_arguments(), torch.ones(24, dtype=BF16)))
    assert refused is None and [c.op.name for c in calls] == ["npu_dynamic_quant", "npu_quant_matmul"]
    product = calls[1]
    assert (
        product["output_dtype"] == BF16 and product["x2"].shape == (96, 24) and product["pertoken_scale"].shape == (10,)
    )
    assert product["bias"].dtype == torch.float32


def test_the_weight_is_seen_transposed_and_not_copied(emulator: Emulator) -> None:
    x, weight, scale = int8_arguments()
    seen = []
    emulator.observers.append(lambda call, result: seen.append(call.arguments.get("x2", call.arguments.get("weight"))))
    import torch_npu

    linear_w8a8(torch_npu, x, weight, scale, None)
    linear_w8a16(torch_npu, x, weight, scale, None)
    assert [t.data_ptr() for t in seen if t is not None] == [weight.data_ptr()] * 2


def test_static_puts_the_correction_before_the_scales_and_a_bias_after() -> None:
    refused, calls = vendor_calls("w8a8_static", (*static_arguments(), None))
    assert refused is None and [c.op.name for c in calls] == ["npu_quantize", "npu_quant_matmul"]
    assert calls[0]["axis"] == -1 and calls[0]["div_mode"] is True and calls[0]["dtype"] == torch.qint8
    assert calls[1]["bias"].dtype == torch.int32
    refused, calls = vendor_calls("w8a8_static", (*static_arguments(), torch.ones(24, dtype=BF16)))
    assert refused is None and calls[1]["bias"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_wrong_correction_or_offset_is_another_result(emulator: Emulator, dtype: torch.dtype) -> None:
    import torch_npu

    op = default_registry().op("linear", "w8a8_static")
    arguments = static_arguments(dtype)
    exact, bound = op.oracle(*arguments, None), op.tolerance.relative(dtype, *arguments, None)
    assert op.error(linear_w8a8_static(torch_npu, *arguments, None), exact) <= bound
    for place, wrong in ((4, -arguments[4]), (5, torch.zeros_like(arguments[5])), (3, 1 / arguments[3])):
        changed = [*arguments]
        changed[place] = wrong
        assert op.error(linear_w8a8_static(torch_npu, *changed, None), exact) > 10 * bound


def test_weight_only_products_keep_float32_scales(emulator: Emulator) -> None:
    """The operator's own scales are bfloat16: a single output then errs by up to a rounding of its scale more."""
    import torch_npu

    x, weight, scale = int8_arguments(rows=64)
    exact = torch.nn.functional.linear(x.double(), weight.double() * scale.double()[:, None])
    ours = linear_w8a16(torch_npu, x, weight, scale, None).double()
    rows = x.reshape(-1, 96)
    naive = torch_npu.npu_weight_quant_batchmatmul(rows, weight.t(), scale.to(BF16)).double().reshape_as(ours)
    assert float((ours - exact).norm() / exact.norm()) < float((naive - exact).norm() / exact.norm())


@pytest.mark.parametrize("variant", ["w8a8", "w8a16"])
def test_vocabularies_are_longer_than_a_product_and_are_cut(variant: str) -> None:
    rows = 151936
    weight, scale = torch.zeros(rows, 64, dtype=torch.int8, device="meta"), torch.zeros(rows, device="meta")
    refused, calls = vendor_calls(variant, (torch.zeros(1, 64, dtype=BF16), weight, scale, None))
    operand = "x2" if variant == "w8a8" else "weight"
    widths = [max(call[operand].shape) for call in calls if operand in call.arguments]
    assert refused is None and sum(widths) == rows and max(widths) <= 65535


def test_what_is_refused_is_said() -> None:
    x, weight, scale = int8_arguments()
    refused, _ = vendor_calls("w8a8", (x.float(), weight, scale, None))
    assert refused == "npu_dynamic_quant: needs input as f16, bf16; input is float32[10, 96]"
    refused, _ = vendor_calls("w8a16", (x.half(), weight, scale, None))
    assert refused is not None and "needs x in bfloat16 here" in refused
    refused, _ = vendor_calls("standard", (x, torch.zeros(3, 96), None))
    assert refused == "linear: needs x, weight and bias of one dtype other than float64"
    refused, _ = vendor_calls("w8a8", (x[:, :0], weight, scale, None))
    assert refused is not None and "not empty" in refused


@pytest.mark.parametrize(("chip", "taken"), [(A2, True), (A3, True), (A5, False), (I310P, False)])
def test_the_chips_of_the_pages(chip: str, taken: bool) -> None:
    dtype = F16 if chip == I310P else BF16
    refused, _ = vendor_calls("w8a8", (*int8_arguments(dtype), None), chip)
    assert (refused is None) == taken, refused
    refused, _ = vendor_calls("w8a8_static", (*static_arguments(dtype), None), chip)
    assert (refused is None) == taken, refused


def test_products_of_floats_say_that_no_vendor_operator_runs() -> None:
    implementation = AscendProvider().implementation("linear", "standard", A2)
    assert implementation is not None and implementation.evidence.rung == "declared"
    assert vendor_calls("standard", (torch.ones(2, 4), torch.ones(3, 4), None)) == (None, [])
