"""Experts on Ascend: larger shapes than the Ops' cases, what each kernel hands the operators, and planted faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, I310P, Call, VendorRefusal
from porter.kernels.ascend.emulator.stand_in import Emulator
from porter.kernels.ascend.experts import (
    KERNELS,
    add_up,
    experts_of_rows,
    experts_standard,
    experts_w4a8,
    product,
    sort_rows,
)
from porter.kernels.ascend.provider import AscendProvider
from porter.kernels.ascend.vendor import load_torch_npu
from porter.kernels.contract import row_error
from porter.kernels.reference.experts_w4a8 import (
    make_scale_bias,
    pack_int4,
    pack_scale,
    scale_groups,
    unpack_int4,
    unpack_scale,
)
from porter.kernels.registry import default_registry

TOKENS, HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 6, 64, 256, 5, 2
VARIANTS = [variant for _, variant in KERNELS]


pytestmark = pytest.mark.usefixtures("emulator")


def stacked(draw: torch.Generator, variant: str, outputs: int, inputs: int) -> tuple[torch.Tensor, ...]:
    if variant == "w4a8":
        weight = torch.randint(-8, 8, (EXPERTS, outputs, inputs), generator=draw).to(torch.int8)
        groups = scale_groups(inputs) if outputs == HIDDEN else 1
        scale = (torch.rand(EXPERTS, groups, outputs, generator=draw) + 0.5) / (4.6 * inputs**0.5)
        return pack_int4(weight), pack_scale(scale), make_scale_bias(weight, scale)
    if variant.endswith(("w8a16", "w8a8")):
        weight = torch.randint(-127, 128, (EXPERTS, outputs, inputs), generator=draw).to(torch.int8)
        return weight, (torch.rand(EXPERTS, outputs, generator=draw) + 0.5) / (73 * inputs**0.5)
    return (torch.randn(EXPERTS, outputs, inputs, generator=draw).bfloat16() * inputs**-0.5,)


def arguments(variant: str, index: torch.Tensor | None = None, tokens: int = TOKENS) -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(11)
    hidden = torch.randn(tokens, HIDDEN, generator=draw).bfloat16()
    weights, drawn = torch.rand(tokens, EXPERTS, generator=draw).topk(TOP_K, dim=-1)
    gate_up = stacked(draw, variant, 2 * INTERMEDIATE, HIDDEN)
    down = stacked(draw, variant, HIDDEN, INTERMEDIATE)
    limit = (0.7,) if variant.startswith("clamped") else ()
    return hidden, drawn if index is None else index, weights, *gate_up, *down, *limit


def error(variant: str, given: tuple[Any, ...]) -> tuple[float, float]:
    """(error of the kernel through the provider, the Op's bound)."""
    op = default_registry().op("experts", variant)
    kernel = AscendProvider().implementation("experts", variant, A2)
    assert kernel is not None and kernel.accepts(*given) is None, kernel and kernel.accepts(*given)
    return row_error(kernel.call(*given), op.oracle(*given)), op.tolerance.relative(torch.bfloat16, *given)


ELSEWHERE = torch.tensor([[0, 5], [-1, 3], [5, 5], [-1, -1], [4, 2], [1, 0]])
"""Choices of experts that other devices have, among them tokens none of whose experts are here."""


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "index",
    [None, ELSEWHERE, torch.full((TOKENS, TOP_K), 3), torch.full((TOKENS, TOP_K), 5)],
    ids=["drawn", "elsewhere", "one expert takes all", "all elsewhere"],
)
def test_kernels_are_within_the_ops_tolerance(variant: str, index: torch.Tensor | None) -> None:
    found, bound = error(variant, arguments(variant, index))
    assert found <= bound


@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_make_documented_calls_for_real_sizes(variant: str) -> None:
    """DeepSeek-V3's experts, as shapes alone."""
    small = arguments(variant)
    sizes = {HIDDEN: 7168, INTERMEDIATE: 2048, 2 * INTERMEDIATE: 4096, EXPERTS: 256, TOP_K: 8, TOKENS: 64}
    sizes |= {HIDDEN // 2: 3584} if variant == "w4a8" else {}

    def grown(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape = [sizes.get(n, n) for n in value.shape]
        if value.dtype == torch.int64 and value.dim() == 3:
            shape[1] = scale_groups(2048) if value.shape[2] == HIDDEN else 1
        if value.dtype == torch.int8 and variant == "w4a8" and value.shape[1] == HIDDEN:
            shape[2] = 2048
        return torch.empty(shape, dtype=value.dtype, device="meta")

    for chip in (A2, A3):
        reason, calls = AscendProvider().calls("experts", variant, chip, tuple(map(grown, small)))
        assert reason is None and len(calls) >= 4


def test_what_the_chips_refuse() -> None:
    for chip, words in ((A5, None), (I310P, "npu_moe_init_routing_v2: is not documented for ascend-310p")):
        reason, _ = AscendProvider().calls("experts", "standard", chip, arguments("standard"))
        assert reason == words or (words is not None and reason is not None and words in reason)
    hidden, *rest = arguments("standard")
    reason, _ = AscendProvider().calls("experts", "standard", A2, (hidden.half(), *rest))
    assert reason is not None and "may overflow float16" in reason
    wide = arguments("w8a8")
    reason, _ = AscendProvider().calls("experts", "w8a8", A2, (wide[0].float(), *wide[1:]))
    assert reason is not None and "output_dtype as" in reason


def observed(emulator: Emulator) -> list[Call]:
    calls: list[Call] = []
    emulator.observers.append(lambda call, _: calls.append(call))
    return calls


def test_stored_weights_are_read_in_place(emulator: Emulator) -> None:
    for variant, kernel in ((v, k) for (_, v), k in KERNELS.items()):
        calls, given = observed(emulator), arguments(variant)
        kernel(load_torch_npu(), *given)
        lists = [value for call in calls for value in call.arguments.values() if isinstance(value, list)]
        passed = {t.data_ptr() for value in lists for t in value if isinstance(t, torch.Tensor)}
        tensors = [t for t in given[3:] if isinstance(t, torch.Tensor)]
        assert {t.data_ptr() for t in tensors if t.dim() == 3 or variant == "w4a8"} <= passed, variant


def test_router_weights_stay_float32(emulator: Emulator) -> None:
    calls = observed(emulator)
    experts_standard(load_torch_npu(), *arguments("standard"))
    assert calls[-1].op.name == "npu_moe_finalize_routing"
    assert (calls[-1]["expanded_permuted_rows"].dtype, calls[-1]["scales"].dtype) == (torch.bfloat16, torch.float32)
    rows, weights = torch.randn(4, 1, 8)[:, 0].half(), torch.tensor([[1 / 3, 2 / 3]] * 2)
    got = add_up(load_torch_npu(), rows, torch.arange(4, dtype=torch.int32), weights)
    exact = (rows.double().view(2, 2, 8) * weights.double()[..., None]).sum(dim=1)
    torch.testing.assert_close(got.double(), exact, rtol=2**-11, atol=1e-7)


def test_rows_know_their_experts() -> None:
    assert experts_of_rows(torch.tensor([2, 0, 1]), 5).tolist() == [0, 0, 2, 2, 2]


def test_a_wrong_scale_bias_is_a_wrong_result_here_and_in_the_reference() -> None:
    given = list(arguments("w4a8"))
    right = experts_w4a8(load_torch_npu(), *given).double()
    given[5] = given[5] * 0
    broken = experts_w4a8(load_torch_npu(), *given)
    op = default_registry().op("experts", "w4a8")
    assert (broken.double() - right).norm() > 0.05 * right.norm()
    assert row_error(broken, op.oracle(*given)) <= op.tolerance.relative(torch.bfloat16, *given)


def test_packing_int4_and_scales() -> None:
    weight = torch.arange(-8, 8, dtype=torch.int8).view(1, 4, 4)
    assert torch.equal(unpack_int4(pack_int4(weight)), weight)
    assert pack_int4(weight)[0, 0].tolist() == [-8 & 15 | (-4 << 4), 0 | 4 << 4]
    scale = torch.tensor([1.5, -2.0, 1e-30])
    assert torch.equal(unpack_scale(pack_scale(scale)), scale)
    assert pack_scale(scale)[0] == 0x3FC00000 and pack_scale(scale)[1] == 0xC0000000
    assert [scale_groups(k) for k in (1408, 256, 2048, 0)] == [1, 1, 8, 1]


def test_planted_faults_are_refused_or_seen() -> None:
    hidden, index, weights, gate_up, _ = arguments("standard", ELSEWHERE)
    rows, places, counts, _ = sort_rows(load_torch_npu(), hidden, index, EXPERTS, quantize=False)
    with pytest.raises(VendorRefusal, match="group_list to cover the rows"):
        load_torch_npu().npu_grouped_matmul(
            [rows],
            [gate_up.transpose(1, 2)],
            group_list=counts,
            split_item=2,
            group_type=0,
            group_list_type=0,
            output_dtype=None,
        )
    with pytest.raises(VendorRefusal, match=r"x \[rows, K\] and weight \[experts, K, N\]"):
        product(load_torch_npu(), rows, gate_up, counts, torch.bfloat16)
    made = product(load_torch_npu(), rows, gate_up.transpose(1, 2), counts, torch.bfloat16)
    assert made[int(counts.sum()) :].isnan().all()
    masked = torch.where(index < 0, 0.0, weights)
    lost = (made[places.long()].view(TOKENS, TOP_K, -1) * masked[..., None]).sum(dim=1)
    assert lost.isnan().any(), "a weight of 0 does not clear undefined rows"
    assert add_up(load_torch_npu(), made, places, weights).isfinite().all()
    with pytest.raises(VendorRefusal, match=r"expert_idx from -1 \(none\) to below expert_num"):
        sort_rows(load_torch_npu(), hidden, index + 2, EXPERTS, quantize=False)
