"""Grouped products fused with the gated activation, or with the sum over experts, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from porter.kernels.ascend.catalogue.formats import unfit_for_blocks
from porter.kernels.ascend.catalogue.vendor_op import VendorRefusal
from porter.kernels.ascend.vendor import load_torch_npu
from porter.kernels.reference.experts_w4a8 import make_scale_bias, pack_int4, pack_scale

COUNTS = [3, 0, 1, 3]
ROWS = [e for e, count in enumerate(COUNTS) for _ in range(count)]
MODES = {
    "dequant_mode": 0,
    "dequant_dtype": torch.float32,
    "quant_mode": 0,
    "quant_dtype": torch.int8,
    "group_list_type": 1,
}
TOTAL = {"output_bs": 4, "group_list_type": 1, "shared_input_weight": 1.0, "shared_input_offset": 0}


pytestmark = pytest.mark.usefixtures("emulator")


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def inputs(inner: int, outputs: int) -> tuple[torch.Tensor, ...]:
    """(x int8 [7, K], weight int8 [4, K, N], its scale [4, N], the scale of x [7])."""
    draw = generator()
    x = torch.randint(-127, 128, (7, inner), generator=draw).to(torch.int8)
    weight = torch.randint(-127, 128, (4, inner, outputs), generator=draw).to(torch.int8)
    scale = (torch.rand(4, outputs, generator=draw) + 0.5) / (73 * inner**0.5)
    return x, weight, scale, torch.rand(7, generator=draw) / 40


def gated(product: torch.Tensor) -> torch.Tensor:
    gate, up = product.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def assert_codes(codes: torch.Tensor, scale: torch.Tensor, exact: torch.Tensor) -> None:
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32
    torch.testing.assert_close(scale.double(), exact.abs().amax(dim=-1) / 127, rtol=1e-5, atol=0.0)
    assert ((codes.double() * scale.double()[:, None] - exact).abs() <= 0.501 * scale.double()[:, None]).all()


def test_swiglu_quant_of_int8_in_both_versions() -> None:
    x, weight, scale, x_scale = inputs(32, 64)
    product = torch.einsum("rk,rkn->rn", x.double(), weight.double()[ROWS])
    exact = gated(product * scale.double()[ROWS] * x_scale.double()[:, None])
    counts = torch.tensor(COUNTS)
    blocked = load_torch_npu().npu_format_cast(weight, 29)
    second = load_torch_npu().npu_grouped_matmul_swiglu_quant_v2(x, [blocked], [scale], x_scale, counts, **MODES)
    first = load_torch_npu().npu_grouped_matmul_swiglu_quant(x, blocked, counts.cumsum(0), scale, x_scale)
    assert_codes(*second, exact)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    with pytest.raises(VendorRefusal, match="group_list to cover the rows"):
        load_torch_npu().npu_grouped_matmul_swiglu_quant(x, blocked, counts, scale, x_scale)
    with pytest.raises(VendorRefusal, match="weight is plain, which this operator reads as FRACTAL_NZ"):
        load_torch_npu().npu_grouped_matmul_swiglu_quant(x, weight, counts.cumsum(0), scale, x_scale)
    with pytest.raises(VendorRefusal, match="weight is plain"):
        load_torch_npu().npu_grouped_matmul_swiglu_quant_v2(x, [weight], [scale], x_scale, counts, **MODES)


@pytest.mark.parametrize("groups", [1, 2])
def test_swiglu_quant_of_int4_needs_its_assist_matrix(groups: int) -> None:
    x, _, _, x_scale = inputs(64, 16)
    plain = torch.randint(-8, 8, (4, 16, 64), generator=generator()).to(torch.int8)
    scale = torch.rand(4, groups, 16, generator=generator()) / 40
    bits, assist = pack_scale(scale), make_scale_bias(plain, scale)
    wide = plain.double() * scale.double().repeat_interleave(64 // groups, dim=1).transpose(1, 2)
    exact = gated(torch.einsum("rk,rnk->rn", x.double(), wide[ROWS]) * x_scale.double()[:, None])
    weight = [pack_int4(plain).view(torch.int32)]

    def call(**changed: Any) -> Any:
        arguments = {**MODES, "dequant_mode": int(groups > 1), "weight_assist_matrix": [assist], **changed}
        stored = [bits if groups > 1 else bits[:, 0]]
        return load_torch_npu().npu_grouped_matmul_swiglu_quant_v2(
            x, weight, stored, x_scale, torch.tensor(COUNTS), **arguments
        )

    assert_codes(*call(), exact)
    wrong = call(weight_assist_matrix=[torch.zeros_like(assist)])
    assert (wrong[0].double() * wrong[1].double()[:, None] - exact).norm() > 0.05 * exact.norm()
    with pytest.raises(VendorRefusal, match="weight_assist_matrix as"):
        call(weight_assist_matrix=None)
    with pytest.raises(VendorRefusal, match="weight_scale"):
        call(dequant_mode=int(groups == 1))
    with pytest.raises(VendorRefusal, match="quant_mode to be one of 0"):
        call(quant_mode=1)


@pytest.mark.parametrize("name", MODES)
def test_swiglu_quant_takes_no_default(name: str) -> None:
    x, weight, scale, x_scale = inputs(32, 64)
    given = {n: v for n, v in MODES.items() if n != name}
    with pytest.raises(VendorRefusal, match=f"{name} is left out"):
        load_torch_npu().npu_grouped_matmul_swiglu_quant_v2(
            x, [weight], [scale], x_scale, torch.tensor(COUNTS), **given
        )


def test_rows_of_no_expert_are_undefined() -> None:
    x, weight, scale, x_scale = inputs(32, 64)
    x[5:] = 0x7F
    blocked = load_torch_npu().npu_format_cast(weight, 29)
    codes, code_scale = load_torch_npu().npu_grouped_matmul_swiglu_quant_v2(
        x, [blocked], [scale], x_scale, torch.tensor([3, 0, 1, 1]), **MODES
    )
    assert (codes[5:] == 0x7F).all() and code_scale[5:].isnan().all()


def finalize(inner: int = 32, outputs: int = 256, **changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the operator gives, the float64 sum), without a shared expert."""
    x, weight, scale, x_scale = inputs(inner, outputs)
    logit, index = torch.rand(7, generator=generator()), torch.tensor([0, 3, 1, 0, 2, 3, 3])
    arguments = {**TOTAL, "scale": scale, "pertoken_scale": x_scale, "logit": logit, "row_index": index, **changed}
    blocked = weight if unfit_for_blocks(weight) else load_torch_npu().npu_format_cast(weight, 29)
    got = load_torch_npu().npu_grouped_matmul_finalize_routing(x, blocked, torch.tensor(COUNTS), **arguments)
    product = torch.einsum("rk,rkn->rn", x.double(), weight.double()[ROWS])
    product = product * scale.double()[ROWS] * (x_scale * logit).double()[:, None]
    return got, torch.zeros(arguments["output_bs"] or 7, outputs, dtype=torch.float64).index_add(0, index, product)


def test_finalize_routing_adds_weighted_rows_and_the_shared_expert() -> None:
    got, exact = finalize()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-6)
    shared = torch.randn(2, 256, generator=generator()).bfloat16()
    got, exact = finalize(shared_input=shared, shared_input_weight=0.5, shared_input_offset=1)
    exact[1:3] += 0.5 * shared.double()
    torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-6)
    assert finalize(output_bs=0)[0].shape == (7, 256)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"outputs": 224}, "N of 32 from 256 on"),
        ({"inner": 24}, "K a multiple of 16"),
        ({"logit": None}, "pertoken_scale, logit and row_index, each [rows]"),
        ({"group_list_type": 0}, "group_list to cover the rows"),
        ({"scale": torch.zeros(4, 255)}, "scale [experts, N]"),
        ({"shared_input": torch.zeros(5, 256, dtype=torch.bfloat16)}, "shared_input to lie within output_bs"),
        ({"dtype": torch.bfloat16}, "dtype to be one of None, f32"),
    ],
)
def test_finalize_routing_refuses_in_words(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(VendorRefusal, match="npu_grouped_matmul_finalize_routing: needs ") as refusal:
        finalize(**changed)
    assert words in str(refusal.value)


@pytest.mark.parametrize("name", TOTAL)
def test_finalize_routing_takes_no_default(name: str) -> None:
    x, weight, scale, _ = inputs(32, 256)
    given = {n: v for n, v in TOTAL.items() if n != name}
    with pytest.raises(VendorRefusal, match=f"{name} is left out"):
        load_torch_npu().npu_grouped_matmul_finalize_routing(x, weight, torch.tensor(COUNTS), scale=scale, **given)
