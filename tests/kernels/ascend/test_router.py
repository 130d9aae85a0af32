"""npu_moe_gating_top_k and its siblings: semantics against float64, refusals in words, traps of the defaults."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from porter.kernels.ascend.catalogue.vendor_op import A5, I310P, VendorRefusal
from porter.kernels.ascend.emulator.stand_in import Emulator, emulated_npu
from porter.kernels.ascend.provider import AscendProvider
from porter.kernels.ascend.router import router_grouped_sigmoid, router_softmax
from porter.kernels.ascend.vendor import load_torch_npu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GATING = {
    "k_group": 1,
    "group_count": 1,
    "group_select_mode": 0,
    "renorm": 0,
    "norm_type": 1,
    "out_flag": False,
    "routed_scaling_factor": 1.0,
    "eps": 1e-20,
}


def logits(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gating(x: torch.Tensor, k: int, **changed: Any) -> Any:
    return load_torch_npu().npu_moe_gating_top_k(x, k, **{**GATING, **changed})


SCORES = {
    0: lambda x: x.exp() / x.exp().sum(dim=-1, keepdim=True),
    1: lambda x: 1 / (1 + (-x).exp()),
    2: lambda x: (1 + x.exp()).log().sqrt(),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_type", SCORES)
@pytest.mark.parametrize(("experts", "groups", "kept", "k"), [(3, 1, 1, 2), (21, 3, 2, 5), (160, 8, 3, 6)])
@pytest.mark.usefixtures("emulator")
def test_gating_is_the_documented_formula(
    dtype: torch.dtype, norm_type: int, experts: int, groups: int, kept: int, k: int
) -> None:
    x, bias = logits(7, experts, dtype=dtype), logits(experts, seed=1, dtype=dtype)
    for mode in (0, 1):
        weights, index, scores = gating(
            x,
            k,
            bias=bias,
            k_group=kept,
            group_count=groups,
            group_select_mode=mode,
            norm_type=norm_type,
            out_flag=True,
            routed_scaling_factor=2.5,
        )
        exact = SCORES[norm_type](x.double())
        for row in range(len(x)):
            choice = exact[row] + bias.double()
            by_group = choice.view(groups, -1)
            best = by_group.max(dim=1)[0] if mode == 0 else by_group.topk(2, dim=1)[0].sum(dim=1)
            shut = set(range(groups)) - set(best.topk(kept)[1].tolist())
            for group in shut:
                by_group[group] = -torch.inf
            assert set(index[row].tolist()) == set(choice.topk(k)[1].tolist())
        picked = exact.gather(1, index.long())
        wanted = picked * 2.5 if norm_type == 0 else picked / picked.sum(dim=-1, keepdim=True) * 2.5
        torch.testing.assert_close(weights.double(), wanted, rtol=2 * torch.finfo(dtype).eps + 2e-6, atol=0.0)
        torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-7)
        assert (weights.dtype, index.dtype, scores.dtype) == (dtype, torch.int32, torch.float32)


@pytest.mark.usefixtures("emulator")
def test_gating_by_a_table_of_token_ids() -> None:
    x, table = logits(3, 8), torch.tensor([[0, 7], [3, 2], [5, 1], [6, 4]])
    weights, index, _ = gating(x, 2, norm_type=2, input_ids=torch.tensor([3, 0, 3]), tid2eid=table)
    assert index.tolist() == [[6, 4], [0, 7], [6, 4]]
    picked = SCORES[2](x.double()).gather(1, index.long())
    torch.testing.assert_close(weights.double(), picked / picked.sum(dim=-1, keepdim=True), rtol=1e-6, atol=0.0)


@pytest.mark.usefixtures("emulator")
def test_the_scores_are_undefined_unless_asked_for() -> None:
    assert gating(logits(2, 4), 1)[2].isnan().all()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"renorm": 1}, "renorm to be one of 0; renorm is 1"),
        ({"norm_type": 3}, "norm_type to be one of 0, 1, 2"),
        ({"group_select_mode": 2}, "group_select_mode to be one of 0, 1"),
        ({"bias": torch.zeros(8, dtype=torch.bfloat16)}, "x / bias as f16/f16, bf16/bf16, f32/f32"),
        ({"bias": torch.zeros(7)}, "bias of 1 dimension, one for each expert"),
        ({"group_count": 3}, "group_count to divide the experts"),
        ({"group_count": 4}, "groups of more than 2"),
        ({"k_group": 2}, "k_group from 1 to group_count"),
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, "input_ids [rows] and tid2eid [token ids, k] together"),
    ],
)
@pytest.mark.usefixtures("emulator")
def test_gating_refuses_in_words(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(VendorRefusal, match="npu_moe_gating_top_k: needs ") as refusal:
        gating(logits(3, 8), 2, **changed)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("x", "k", "words"),
    [
        (torch.zeros(3, 8), 9, "k from 1 to the experts of k_group groups"),
        (torch.zeros(3, 2049), 2, "dimension 1 of x at most 2048"),
        (torch.zeros(0, 8), 2, "dimension 0 of x at least 1"),
        (torch.zeros(8), 2, "x of 2 dimensions"),
        (torch.zeros(3, 8, dtype=torch.float64), 2, "x / bias as"),
    ],
)
@pytest.mark.usefixtures("emulator")
def test_gating_refuses_shapes_in_words(x: torch.Tensor, k: int, words: str) -> None:
    with pytest.raises(VendorRefusal) as refusal:
        gating(x, k)
    assert words in str(refusal.value)


@pytest.mark.parametrize("name", GATING)
@pytest.mark.usefixtures("emulator")
def test_gating_takes_no_default(name: str) -> None:
    with pytest.raises(VendorRefusal, match=f"{name} is left out"):
        load_torch_npu().npu_moe_gating_top_k(logits(3, 8), 2, **{n: v for n, v in GATING.items() if n != name})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("emulator")
def test_softmax_gating_does_not_divide_by_the_sum_and_its_second_version_may(dtype: torch.dtype) -> None:
    x = logits(5, 9, dtype=dtype)
    exact = SCORES[0](x.double())
    weights, index, rows = load_torch_npu().npu_moe_gating_top_k_softmax(x, None, k=3)
    plain, again, scores = load_torch_npu().npu_moe_gating_top_k_softmax_v2(x, k=3, renorm=0, output_softmax=True)
    divided, same, nothing = load_torch_npu().npu_moe_gating_top_k_softmax_v2(x, k=3, renorm=1, output_softmax=False)
    picked = exact.gather(1, index.long())
    bound = 2 * torch.finfo(dtype).eps + 2e-6
    torch.testing.assert_close(weights.double(), picked, rtol=bound, atol=0.0)
    torch.testing.assert_close(plain.double(), picked, rtol=bound, atol=0.0)
    torch.testing.assert_close(divided.double(), picked / picked.sum(dim=-1, keepdim=True), rtol=bound, atol=0.0)
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=0.0)
    assert torch.equal(index, again) and torch.equal(index, same) and nothing.numel() == 0
    assert rows.tolist() == [[token + 5 * choice for choice in range(3)] for token in range(5)]


@pytest.mark.usefixtures("emulator")
def test_softmax_gating_refuses_in_words() -> None:
    with pytest.raises(VendorRefusal, match="k is left out; its default 1"):
        load_torch_npu().npu_moe_gating_top_k_softmax(logits(3, 8))
    with pytest.raises(VendorRefusal, match="k from 1 to the experts and to 1024"):
        load_torch_npu().npu_moe_gating_top_k_softmax(logits(3, 8), None, k=9)
    with pytest.raises(VendorRefusal, match="no finished, which is not modelled"):
        load_torch_npu().npu_moe_gating_top_k_softmax(logits(3, 8), torch.zeros(3, dtype=torch.bool), k=2)
    with pytest.raises(VendorRefusal, match="output_softmax False where renorm is 1"):
        load_torch_npu().npu_moe_gating_top_k_softmax_v2(logits(3, 8), k=2, renorm=1, output_softmax=True)


def test_kernels_hand_the_operators_float32_logits_and_bias(emulator: Emulator) -> None:
    seen: list[Any] = []
    emulator.observers.append(lambda call, _: seen.append(call))
    hidden, weight, bias = (logits(*shape, dtype=torch.bfloat16) for shape in ((4, 16), (12, 16), (12,)))
    router_grouped_sigmoid(load_torch_npu(), hidden, weight, bias, 3, 2, 1, True, 2.5)
    router_softmax(load_torch_npu(), hidden, weight, 3, True)
    assert [(call["x"].dtype, call.op.name) for call in seen] == [
        (torch.float32, "npu_moe_gating_top_k"),
        (torch.float32, "npu_moe_gating_top_k_softmax"),
    ]
    assert seen[0]["bias"].dtype == torch.float32


@pytest.mark.usefixtures("emulator")
def test_bfloat16_logits_choose_other_experts_where_the_kernel_does_not() -> None:
    weight, hidden = logits(256, 64, seed=3), logits(64, 64, seed=4)
    bias = torch.linspace(0.0, 0.02, 256)
    exact = torch.topk((hidden.double() @ weight.double().T).sigmoid() + bias.double(), 8)[1].sort()[0]
    mine = router_grouped_sigmoid(load_torch_npu(), hidden, weight, bias, 8, 1, 1, True, 1.0)[2].sort()[0]
    narrow = (hidden @ weight.T).bfloat16()
    others = gating(narrow, 8, bias=bias.bfloat16())[1].long().sort()[0]
    assert torch.equal(mine, exact)
    assert not torch.equal(others, exact)


def test_what_the_chips_refuse() -> None:
    arguments = (torch.zeros(2, 8), torch.zeros(6, 8), 2, True)
    assert AscendProvider().calls("router", "softmax", A5, arguments)[0] is None
    reason, _ = AscendProvider().calls("router", "softmax", I310P, arguments)
    assert reason is not None and "needs x as f16; x is float32[2, 6]" in reason
    reason, _ = AscendProvider().calls("router", "grouped_softmax", I310P, (*arguments[:3], 1, 1, 1.0))
    assert reason is not None and "is not documented for ascend-310p" in reason
    with emulated_npu(I310P):
        assert not load_torch_npu().npu_moe_gating_top_k_softmax(logits(1024, 32).half(), None, k=2)[2].any()
        for rows, experts in ((1025, 32), (4, 24), (4, 272)):
            with pytest.raises(VendorRefusal, match=r"at most 1024|a multiple of 16 to 256"):
                load_torch_npu().npu_moe_gating_top_k_softmax(logits(rows, experts).half(), None, k=2)
