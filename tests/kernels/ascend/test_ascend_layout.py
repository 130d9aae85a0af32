"""FRACTAL_NZ: the cast, what may be in it, which weights of a model go into it, and what notices a wrong one."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from porter.kernels.ascend.catalogue.vendor_op import A2, CHIPS, FRACTAL_NZ, VendorRefusal
from porter.kernels.ascend.dry_run import DryVendor
from porter.kernels.ascend.emulator.stand_in import Emulator
from porter.kernels.ascend.layout import lay_out, matmul_weights, misplaced, worth_laying_out
from porter.kernels.ascend.provider import AscendProvider
from porter.kernels.dispatch import OpCall
from porter.models.linear import Int8Linear, Linear

BF16, I8 = torch.bfloat16, torch.int8
PLAIN = 2


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, dtype=BF16))
        self.rms_norm = OpCall("rms_norm", "standard")


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 64, dtype=BF16))
        self.router = OpCall("router", "softmax")


class Experts(nn.Module):
    def __init__(self, variant: str) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(4, 64, 64, dtype=I8), requires_grad=False)
        self.down_proj = nn.Parameter(torch.ones(4, 64, 32, dtype=I8), requires_grad=False)
        self.gate_up_proj_scale = nn.Parameter(torch.ones(4, 64), requires_grad=False)
        self.experts = OpCall("experts", variant)


class Grouped(Linear):
    """As the rewrite of a linear layer over groups makes it."""

    def __init__(self) -> None:
        super().__init__(64, 64, bias=False, dtype=BF16)
        del self.linear
        self.grouped = OpCall("linear", "grouped")


class Model(nn.Module):
    """One of each kind of weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(48, 64, dtype=BF16)
        self.q_proj = Int8Linear(64, 96, False, "w8a8", BF16)
        self.k_proj = Int8Linear(64, 24, False, "w8a8", BF16)
        self.v_proj = Int8Linear(64, 1, False, "w8a8", BF16)
        self.o_proj = Int8Linear(96, 64, True, "w8a16", BF16)
        self.kv_b_proj = nn.Linear(64, 64, bias=False, dtype=BF16)
        self.dense = Linear(64, 64, bias=False, dtype=BF16)
        self.wide = Linear(64, 64, bias=False, dtype=torch.float32)
        self.grouped = Grouped()
        self.conv1d = nn.Conv1d(64, 64, 4, groups=64, dtype=BF16)
        self.norm = Norm()
        self.router = Router()
        self.experts = Experts("w8a8")
        self.lm_head = Linear(64, 48, bias=False, dtype=BF16)
        self.lm_head.weight = self.embed_tokens.weight
        for parameter in self.parameters():
            if parameter.dtype == I8:
                parameter.data = torch.randint(-127, 128, parameter.shape, dtype=I8)
            else:
                parameter.data.normal_()


def test_the_default_is_quantized_weights_of_products_that_read_blocks(emulator: Emulator) -> None:
    model, vendor = Model(), sys.modules["torch_npu"]
    chosen = ("q_proj.weight", "experts.gate_up_proj", "experts.down_proj")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert worth_laying_out(model) == list(chosen)
    assert lay_out(vendor, model) == chosen
    for name, parameter in model.named_parameters():
        assert vendor.get_npu_format(parameter) == (FRACTAL_NZ if name in chosen else PLAIN), name
        assert torch.equal(parameter, before[name])
    assert vendor.get_npu_format(model.q_proj.weight.t()) == FRACTAL_NZ


def test_matmul_weights_leave_out_what_anything_else_reads() -> None:
    names = matmul_weights(Model())
    assert {"dense.weight", "q_proj.weight", "experts.down_proj"} <= set(names)
    assert not [
        n for n in names if n.split(".")[0] in ("embed_tokens", "lm_head", "conv1d", "norm", "router", "kv_b_proj")
    ]


@pytest.mark.parametrize(
    "name, words",
    (
        (
            "conv1d.weight",
            "it is a parameter of Conv1d, which no Op reads, and not from FRACTAL_NZ; it must stay plain",
        ),
        ("norm.weight", "it is a parameter of Norm, which rms_norm/standard reads"),
        ("embed_tokens.weight", "it is a parameter of Embedding"),
        ("router.weight", "it is a parameter of Router, which router/softmax reads"),
        ("kv_b_proj.weight", "it is a parameter of Linear, which no Op reads"),
        ("grouped.weight", "which linear/grouped reads"),
        ("o_proj.weight", "it is a parameter of Int8Linear, which linear/w8a16 reads"),
        ("o_proj.weight_scale", "which linear/w8a16 reads"),
        ("lm_head.weight", "it is tied to a parameter that no matrix product reads"),
        ("k_proj.weight", "int8[24, 64]: its last two dimensions are no multiples of 16 and 32"),
        ("v_proj.weight", "int8[1, 64]: a matrix of one row or column is not read from blocks"),
        ("wide.weight", "float32[64, 64]: products of float32 read it as plain"),
        ("nothing.weight", "the model has no such parameter"),
    ),
)
def test_what_must_stay_plain_is_refused_by_name_before_any_cast(emulator: Emulator, name: str, words: str) -> None:
    model, vendor = Model(), sys.modules["torch_npu"]
    with pytest.raises(VendorRefusal) as refusal:
        lay_out(vendor, model, ["q_proj.weight", name])
    assert str(refusal.value).startswith(f"{name}: ") and words in str(refusal.value)
    assert vendor.get_npu_format(model.q_proj.weight) == PLAIN


def test_a_vocabulary_that_products_read_in_parts_stays_plain() -> None:
    model = nn.Module()
    model.lm_head = Linear(16, 65536, bias=False, dtype=BF16, device="meta")
    with pytest.raises(VendorRefusal, match="products take 65535 rows at most"):
        lay_out(DryVendor(A2), model, ["lm_head.weight"])


def test_float_weights_are_laid_out_when_named(emulator: Emulator) -> None:
    model, vendor = Model(), sys.modules["torch_npu"]
    assert lay_out(vendor, model, ["dense.weight", "dense.weight"]) == ("dense.weight",)
    assert vendor.get_npu_format(model.dense.weight) == FRACTAL_NZ


def test_a_convolutions_weight_that_somebody_cast_is_found(emulator: Emulator) -> None:
    model, vendor = Model(), sys.modules["torch_npu"]
    lay_out(vendor, model)
    assert misplaced(vendor, model) == []
    model.norm.weight.data = vendor.npu_format_cast(model.norm.weight.data.repeat(16, 1), FRACTAL_NZ)
    model.conv1d.weight.data = vendor.npu_format_cast(torch.zeros(64, 16, 16, dtype=BF16), FRACTAL_NZ)
    found = misplaced(vendor, model)
    assert [line.split(":")[0] for line in found] == ["conv1d.weight", "norm.weight"]
    assert "it is a parameter of Conv1d" in found[0]


def test_a_product_over_a_weight_in_blocks_is_the_same(emulator: Emulator) -> None:
    model, x = Model(), torch.randn(5, 64).to(BF16)
    kernel = AscendProvider().implementation("linear", "w8a8", A2)
    assert kernel is not None
    arguments = (x, model.q_proj.weight, model.q_proj.weight_scale, None)
    plain = kernel.call(*arguments)
    lay_out(sys.modules["torch_npu"], model)
    assert kernel.accepts(*arguments) is None
    assert torch.equal(kernel.call(x, model.q_proj.weight, model.q_proj.weight_scale, None), plain)


def test_a_weight_in_blocks_is_noticed_where_it_is_read_as_plain(emulator: Emulator) -> None:
    vendor = sys.modules["torch_npu"]
    blocked = vendor.npu_format_cast(torch.randn(16, 64).to(BF16), FRACTAL_NZ)
    with pytest.raises(VendorRefusal, match="npu_swiglu: input is in FRACTAL_NZ, which this operator reads as plain"):
        vendor.npu_swiglu(blocked, dim=-1)
    back = vendor.npu_format_cast(blocked, PLAIN)
    assert vendor.get_npu_format(back) == PLAIN and vendor.get_npu_format(blocked) == FRACTAL_NZ
    vendor.npu_swiglu(back, dim=-1)


def test_a_part_of_a_matrix_in_blocks_is_refused(emulator: Emulator) -> None:
    model, x = Model(), torch.randn(5, 64).to(BF16)
    lay_out(sys.modules["torch_npu"], model)
    kernel = AscendProvider().implementation("linear", "w8a8", A2)
    assert kernel is not None
    with pytest.raises(
        VendorRefusal, match="x2 is a part of a matrix in FRACTAL_NZ, whose blocks lie apart; cut first"
    ):
        kernel.call(x, model.q_proj.weight[:32], model.q_proj.weight_scale[:32], None)


CAST_REFUSED: tuple[tuple[torch.Tensor, int, dict[str, Any]], ...] = (
    (torch.zeros(16, 1, dtype=BF16), FRACTAL_NZ, {}),
    (torch.zeros(1, 16, dtype=BF16), FRACTAL_NZ, {}),
    (torch.zeros(64, dtype=BF16), FRACTAL_NZ, {}),
    (torch.zeros(24, 16, dtype=BF16), FRACTAL_NZ, {}),
    (torch.zeros(16, 24, dtype=BF16), FRACTAL_NZ, {}),
    (torch.zeros(16, 16, dtype=I8), FRACTAL_NZ, {}),
    (torch.zeros(16, 32, dtype=torch.float64), FRACTAL_NZ, {}),
    (torch.zeros(16, 32, dtype=BF16), 4, {}),
    (torch.zeros(16, 32, dtype=BF16), FRACTAL_NZ, {"customize_dtype": 3}),
)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("tensor, acl_format, keywords", CAST_REFUSED)
def test_casts_that_are_refused(chip: str, tensor: torch.Tensor, acl_format: int, keywords: dict[str, Any]) -> None:
    with pytest.raises(VendorRefusal, match="npu_format_cast: needs "):
        DryVendor(chip).npu_format_cast(tensor, acl_format, **keywords)


@pytest.mark.parametrize("dtype", (torch.float16, BF16, torch.float32, I8, torch.int32))
def test_casts_of_every_dtype_keep_shape_and_values(emulator: Emulator, dtype: torch.dtype) -> None:
    matrix = torch.arange(3 * 64 * 32).reshape(3, 64, 32).to(dtype)
    for tensor in (matrix, matrix.transpose(1, 2)) if dtype != I8 else (matrix,):
        cast = sys.modules["torch_npu"].npu_format_cast(tensor, FRACTAL_NZ)
        assert torch.equal(cast, tensor) and cast.dtype == dtype and cast.data_ptr() != tensor.data_ptr()
    plain = sys.modules["torch_npu"].npu_format_cast(torch.ones(3, 1), PLAIN)
    assert plain.shape == (3, 1)
