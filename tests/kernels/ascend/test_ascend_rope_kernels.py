"""Porter's rotary embeddings on Ascend: which calls they make, and what these leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from porter.kernels.ascend.catalogue.vendor_op import A2, Call
from porter.kernels.ascend.emulator.stand_in import Emulator
from porter.kernels.ascend.provider import AscendProvider
from porter.kernels.registry import default_registry

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(*shape: int, dtype: torch.dtype = BF16, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of shape [..., D], the same for both halves."""
    turn = 3 * normal(*shape[:-1], shape[-1] // 2, dtype=F32, seed=7)
    both = torch.cat((turn, turn), dim=-1)
    return (factor * both.cos()).to(dtype), (factor * both.sin()).to(dtype)


def kernel(variant: str) -> Any:
    found = AscendProvider().implementation("rope", variant, A2)
    assert found is not None
    return found


def watched(emulator: Emulator) -> list[Call]:
    calls: list[Call] = []
    emulator.observers.append(lambda call, result: calls.append(call))
    return calls


@pytest.mark.parametrize("variant", ("half", "interleaved", "trailing"))
@pytest.mark.parametrize("rotary", (16, 64))
def test_kernels_apply_yarns_factor(emulator: Emulator, variant: str, rotary: int) -> None:
    op = default_registry().op("rope", variant)
    query, key = normal(2, 4, 3, rotary), normal(2, 1, 3, rotary, seed=1)
    cos, sin = angles(2, 3, rotary, factor=1.37)
    arguments: tuple[Any, ...] = (query, key, cos, sin)
    if variant == "trailing":
        arguments = (query, cos[..., : rotary // 2], sin[..., : rotary // 2])
    assert kernel(variant).accepts(*arguments) is None
    result = kernel(variant).call(*arguments)
    assert op.error(result, op.oracle(*arguments), *arguments) <= op.tolerance.relative(BF16, *arguments)


@pytest.mark.parametrize("variant", ("half", "interleaved"))
@pytest.mark.parametrize("rotary", (16, 64, 128))
def test_kernels_leave_their_arguments_alone(emulator: Emulator, variant: str, rotary: int) -> None:
    arguments = (normal(2, 4, 3, rotary), normal(2, 1, 3, rotary), *angles(2, 3, rotary))
    before = [a.clone() for a in arguments]
    kernel(variant).call(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))


@pytest.mark.parametrize(
    "variant, rotary, heads, dtype, names",
    (
        ("half", 128, 8, BF16, ["npu_apply_rotary_pos_emb"]),
        ("half", 64, 8, F32, ["npu_apply_rotary_pos_emb"]),
        ("half", 64, 200, BF16, ["npu_rotary_mul"] * 2),
        ("half", 80, 8, BF16, ["npu_rotary_mul"] * 2),
        ("interleaved", 64, 8, BF16, ["npu_interleave_rope"] * 2),
        ("interleaved", 64, 8, F32, ["npu_apply_rotary_pos_emb"]),
        ("interleaved", 32, 8, F16, ["npu_rotary_mul"] * 2),
    ),
)
def test_calls(emulator: Emulator, variant: str, rotary: int, heads: int, dtype: torch.dtype, names: list[str]) -> None:
    query, key = normal(1, heads, 2, rotary, dtype=dtype), normal(1, 2, 2, rotary, dtype=dtype)
    arguments = (query, key, *angles(1, 2, rotary, dtype=dtype))
    calls = watched(emulator)
    assert kernel(variant).accepts(*arguments) is None
    kernel(variant).call(*arguments)
    assert [call.op.name for call in calls] == names


def test_a_projections_view_is_turned_without_a_copy(emulator: Emulator) -> None:
    fused = normal(2, 3, 6 * 16)
    query, key = (part.view(2, 3, -1, 16).transpose(1, 2) for part in fused.split([64, 32], dim=-1))
    calls = watched(emulator)
    kernel("half").call(query, key, *angles(2, 3, 16))
    storage = fused.untyped_storage().data_ptr()
    assert [call["input"].untyped_storage().data_ptr() for call in calls] == [storage, storage]
