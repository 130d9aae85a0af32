"""Sorting rows by expert and adding them up: documented layouts of the indices, undefined rows, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from porter.kernels.ascend.catalogue.vendor_op import VendorRefusal
from porter.kernels.ascend.vendor import load_torch_npu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVE = {
    "active_num": -1,
    "expert_num": 4,
    "drop_pad_mode": 0,
    "expert_tokens_num_type": 1,
    "expert_tokens_num_flag": True,
    "quant_mode": -1,
    "active_expert_range": [0, 4],
    "row_idx_type": 0,
}
IDS = torch.tensor([[2, 0], [1, 2], [0, 3]], dtype=torch.int32)
SORTED = [1, 4, 2, 0, 3, 5]
"""Flat positions in IDS by expert, then token."""


pytestmark = pytest.mark.usefixtures("emulator")


def tokens(dtype: torch.dtype = torch.float32, size: int = 5) -> torch.Tensor:
    return torch.randn(3, size, generator=torch.Generator().manual_seed(0)).to(dtype)


def sort(x: torch.Tensor, ids: torch.Tensor = IDS, **changed: Any) -> Any:
    return load_torch_npu().npu_moe_init_routing_v2(x, ids, **{**ACTIVE, **changed})


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_sorted_by_expert_then_token(dtype: torch.dtype) -> None:
    x = tokens(dtype)
    rows, index, counts, _ = sort(x)
    assert torch.equal(rows, x[[position // 2 for position in SORTED]])
    assert [index.tolist()[position] for position in SORTED] == [0, 1, 2, 3, 4, 5]
    assert counts.tolist() == [2, 1, 2, 1] and counts.dtype == torch.int64 and index.dtype == torch.int32
    assert sort(x, row_idx_type=1)[1].tolist() == SORTED
    assert sort(x, expert_tokens_num_type=0)[2].tolist() == [2, 3, 5, 6]


def test_rows_of_experts_out_of_range_are_undefined() -> None:
    x = tokens()
    rows, index, counts, _ = sort(x, active_expert_range=[1, 3])
    assert torch.equal(rows[:3], x[[1, 0, 1]]) and rows[3:].isnan().all()
    assert index.tolist() == [1, -1, 0, 2, -1, -1] and counts.tolist() == [1, 2]
    ids = torch.where(IDS == 3, -1, IDS)
    assert sort(x, ids)[1].tolist() == [3, 0, 2, 4, 1, -1]
    assert int(sort(x, active_expert_range=[1, 3], row_idx_type=1)[1][-1]) == 0x7F7F7F7F
    codes = sort(x, active_expert_range=[1, 3], quant_mode=1)
    assert (codes[0][3:] == 0x7F).all() and codes[3][3:].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_dynamic_quantization_is_symmetric_per_row(dtype: torch.dtype) -> None:
    x = tokens(dtype, 33)
    x[1] = 0
    codes, _, _, scale = sort(x, quant_mode=1)
    source = x[[position // 2 for position in SORTED]].double()
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32
    torch.testing.assert_close(scale.double(), source.abs().amax(dim=-1) / 127, rtol=1e-6, atol=0.0)
    assert ((codes.double() * scale.double()[:, None] - source).abs() <= 0.5001 * scale.double()[:, None]).all()
    assert not codes[[2, 4]].any() and not scale[[2, 4]].any()


@pytest.mark.parametrize("name", ACTIVE)
def test_sorting_takes_no_default(name: str) -> None:
    with pytest.raises(VendorRefusal, match=f"{name} is left out"):
        load_torch_npu().npu_moe_init_routing_v2(tokens(), IDS, **{n: v for n, v in ACTIVE.items() if n != name})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"quant_mode": 2}, "quant_mode to be one of -1, 1"),
        ({"drop_pad_mode": 1}, "drop_pad_mode to be one of 0"),
        ({"expert_tokens_num_type": 2}, "expert_tokens_num_type to be one of 0, 1"),
        ({"expert_tokens_num_flag": False}, "expert_tokens_num_flag to be one of True"),
        ({"active_expert_range": [2, 5]}, "active_expert_range to be [first, last) within expert_num"),
        ({"active_num": 4}, "active_num to be -1, 0 or rows * k"),
        ({"scale": torch.ones(3)}, "no scale or offset or x_dtype"),
        ({"expert_num": 3, "active_expert_range": [0, 3]}, "expert_idx from -1 (none) to below expert_num"),
        ({"row_idx_type": 2}, "row_idx_type to be one of 0, 1"),
    ],
)
def test_sorting_refuses_in_words(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(VendorRefusal, match="npu_moe_init_routing_v2: needs ") as refusal:
        sort(tokens(), **changed)
    assert words in str(refusal.value)


def test_sorting_refuses_int64_experts_and_no_tokens() -> None:
    with pytest.raises(VendorRefusal, match="expert_idx as i32; expert_idx is int64"):
        sort(tokens(), IDS.long())
    with pytest.raises(VendorRefusal, match="dimension 0 of x at least 1"):
        sort(tokens()[:0], IDS[:0])


def finalize(rows: torch.Tensor, scales: torch.Tensor | None, index: torch.Tensor, mode: int) -> Any:
    return load_torch_npu().npu_moe_finalize_routing(rows, None, None, None, scales, index, None, drop_pad_mode=mode)


@pytest.mark.parametrize(
    ("dtype", "wide"), [*((d, d) for d in DTYPES), (torch.bfloat16, torch.float32)], ids=lambda d: str(d)[6:]
)
def test_adding_up_reads_the_index_row_by_row_or_column_by_column(dtype: torch.dtype, wide: torch.dtype) -> None:
    x, weights = tokens(dtype), torch.rand(3, 2, generator=torch.Generator().manual_seed(1)).to(wide)
    rows, index, _, _ = sort(x)
    exact = (x.double()[:, None] * weights.double()[..., None]).sum(dim=1)
    bound = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    mine = finalize(rows, weights, index, 2)
    assert mine.dtype == dtype
    torch.testing.assert_close(mine.double(), exact, **bound)
    torch.testing.assert_close(finalize(rows, weights, index.view(3, 2).T.flatten(), 0).double(), exact, **bound)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(finalize(rows, weights, index, 0).double(), exact, **bound)


def test_minus_one_adds_nothing_where_it_is_documented() -> None:
    rows = torch.tensor([[1.0, 2.0], [torch.nan, torch.nan]])
    index, weights = torch.tensor([0, -1], dtype=torch.int32), torch.tensor([[0.5, 9.0]])
    assert finalize(rows[:, None], weights, index, 3).tolist() == [[0.5, 1.0]]
    with pytest.raises(VendorRefusal, match="-1, none, only where drop_pad_mode is 1 or 3"):
        finalize(rows, weights, index, 2)


@pytest.mark.parametrize(
    ("rows", "scales", "mode", "words"),
    [
        (torch.zeros(6, 4, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.float16), 2, "rows / scales as"),
        (torch.zeros(6, 4, dtype=torch.float16), torch.zeros(3, 2), 2, "expanded_permuted_rows / scales as f16/f16"),
        (torch.zeros(6, 4), torch.zeros(3, 2), 3, "[experts, capacity, H] where 1 or 3"),
        (torch.zeros(6, 4), torch.zeros(2, 2), 2, "as many values as expanded_src_to_dst_row has"),
        (torch.zeros(6, 4), torch.zeros(3, 2), 4, "drop_pad_mode to be one of 0, 1, 2, 3"),
        (torch.zeros(5, 4), torch.zeros(3, 2), 2, "expanded_src_to_dst_row from 0 to below the rows"),
    ],
)
def test_adding_up_refuses_in_words(rows: torch.Tensor, scales: torch.Tensor, mode: int, words: str) -> None:
    with pytest.raises(VendorRefusal) as refusal:
        finalize(rows, scales, torch.arange(6, dtype=torch.int32), mode)
    assert words in str(refusal.value)


def test_adding_up_takes_no_default_layout() -> None:
    with pytest.raises(VendorRefusal, match="drop_pad_mode is left out; its default 0"):
        load_torch_npu().npu_moe_finalize_routing(
            torch.zeros(2, 4), None, None, None, torch.zeros(1, 2), torch.arange(2, dtype=torch.int32), None
        )


def test_the_first_sorting_numbers_rows_column_by_column() -> None:
    x, row_idx = tokens(), torch.tensor([[0, 3], [1, 4], [2, 5]], dtype=torch.int32)
    rows, index, experts = load_torch_npu().npu_moe_init_routing(x, row_idx, IDS, 3)
    assert experts.tolist() == [0, 0, 1, 2, 2, 3]
    assert torch.equal(rows, x[[position // 2 for position in SORTED]])
    weights = torch.rand(3, 2, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(finalize(rows, weights, index, 0), x * weights.sum(dim=1, keepdim=True))
    with pytest.raises(VendorRefusal, match="row_idx to count the rows column by column"):
        load_torch_npu().npu_moe_init_routing(x, torch.arange(6, dtype=torch.int32).view(3, 2), IDS, 3)


def test_permuting_and_back() -> None:
    x, weights = tokens(torch.bfloat16), torch.tensor([[0.5, 0.25]] * 3, dtype=torch.bfloat16)
    rows, index = load_torch_npu().npu_moe_token_permute(x, IDS.long())
    assert torch.equal(rows, x[[position // 2 for position in SORTED]])
    back = load_torch_npu().npu_moe_token_unpermute(rows, index, probs=weights)
    torch.testing.assert_close(back, x * 0.75, rtol=2**-7, atol=0.0)
    assert load_torch_npu().npu_moe_token_permute(x, IDS.long(), num_out_tokens=-1)[0].shape == (5, 5)
    assert torch.equal(load_torch_npu().npu_moe_token_unpermute(rows, index), x[[0, 0, 1, 1, 2, 2]])


def test_unpermuting_refuses_the_index_of_inactive_experts() -> None:
    x = tokens(torch.bfloat16)
    rows, index, _, _ = sort(x, active_expert_range=[1, 3])
    with pytest.raises(VendorRefusal, match="negative ones are rows of inactive experts"):
        load_torch_npu().npu_moe_token_unpermute(rows, index, probs=torch.zeros(3, 2, dtype=torch.bfloat16))
    with pytest.raises(VendorRefusal, match="permuted_tokens / probs as bf16/bf16"):
        load_torch_npu().npu_moe_token_unpermute(rows, index, probs=torch.zeros(3, 2))
