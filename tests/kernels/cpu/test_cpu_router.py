"""Routers where torch.topk itself is particular: ties, NaN, every expert picked, two groups, odd numbers of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from porter.kernels.cpu.provider import CpuProvider
from porter.kernels.registry import default_registry

Route = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@pytest.fixture(params=["softmax", "grouped_sigmoid", "grouped_softmax"])
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def kernel(provider: CpuProvider, variant: str) -> Route:
    found = provider.implementation("router", variant)
    assert found is not None

    def route(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        reason = found.accepts(*arguments)
        assert reason is None, reason
        result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = found.call(*arguments)
        return result

    return route


def settings(variant: str, experts: int, top_k: int, groups: int = 1, kept: int = 1) -> tuple[Any, ...]:
    """What follows hidden and weight."""
    if variant == "softmax":
        return top_k, True
    if variant == "grouped_softmax":
        return top_k, groups, kept, 2.5
    bias = torch.linspace(-0.2, 0.2, experts)
    return bias, top_k, groups, kept, True, 2.5


@pytest.mark.parametrize(("tokens", "threads"), [(1, 1), (2, 2), (5, 1), (31, 2)])
@pytest.mark.parametrize(("experts", "size"), [(2, 1), (16, 64), (17, 33), (61, 127), (130, 48)])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16),
                                    (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)])  # fmt: skip
def test_every_width_dtype_and_number_of_picks(
    provider: CpuProvider, variant: str, tokens: int, threads: int, experts: int, size: int,
    dtypes: tuple[torch.dtype, ...],
) -> None:  # fmt: skip
    op = default_registry().op("router", variant)
    generator = torch.Generator().manual_seed(experts * 100 + tokens)
    hidden = torch.randn(tokens, size, generator=generator).to(dtypes[0])
    weight = (torch.randn(experts, size, generator=generator) * 2 * size**-0.5).to(dtypes[1])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for top_k in {1, experts // 2, experts}:
            arguments = (hidden, weight, *settings(variant, experts, top_k))
            error = op.error(kernel(provider, variant)(*arguments), op.oracle(*arguments), *arguments)
            assert error <= op.tolerance.relative(dtypes[0], *arguments), (top_k, error)
    finally:
        torch.set_num_threads(before)


def test_every_expert_picked_comes_in_descending_order(provider: CpuProvider, variant: str) -> None:
    weight = torch.eye(7)[torch.randperm(7, generator=torch.Generator().manual_seed(2))]
    hidden = torch.linspace(-2, 3, 7)[None]
    arguments = (hidden, weight, *settings(variant, 7, 7))
    for ours, reference in zip(
        kernel(provider, variant)(*arguments), default_registry().op("router", variant).reference(*arguments),
        strict=True,
    ):  # fmt: skip
        assert torch.allclose(ours.double(), reference.double(), rtol=1e-5)


def test_of_equal_experts_the_first_are_picked_once_each(provider: CpuProvider, variant: str) -> None:
    rest = list(settings(variant, 19, 4))
    if variant == "grouped_sigmoid":
        rest[0] = torch.zeros(19)
    logits, weights, indices = kernel(provider, variant)(torch.ones(3, 8), torch.ones(19, 8), *rest)
    assert torch.equal(indices, torch.arange(4).expand(3, 4))
    assert torch.equal(weights, weights[:1, :1].expand(3, 4)) and torch.equal(logits, torch.full((3, 19), 8.0))


def test_the_two_groups_of_two_experts(provider: CpuProvider) -> None:
    """Group 0 has the best expert, group 1 the best sum: only group 1 is picked from."""
    weight = torch.tensor([[3.0], [-9.0], [1.0], [2.0]])
    route = kernel(provider, "grouped_sigmoid")
    _, weights, indices = route(torch.ones(1, 1), weight, torch.zeros(4), 2, 2, 1, False, 1.0)
    assert indices.tolist() == [[3, 2]]
    assert torch.allclose(weights, torch.tensor([[2.0, 1.0]]).sigmoid())


def test_a_group_that_is_left_out_is_picked_from_when_nothing_else_is_left(provider: CpuProvider) -> None:
    route = kernel(provider, "grouped_sigmoid")
    arguments = (torch.ones(1, 1), torch.arange(4.0)[:, None], torch.zeros(4), 4, 2, 1, False, 1.0)
    _, weights, indices = route(*arguments)
    assert indices[0, :2].tolist() == [3, 2] and sorted(indices[0].tolist()) == [0, 1, 2, 3]
    assert torch.allclose(weights, indices.float().sigmoid())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_token_that_is_no_number_spoils_no_other(provider: CpuProvider, variant: str, bad: float) -> None:
    generator = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(5, 16, generator=generator), torch.rand(12, 16, generator=generator)
    arguments = settings(variant, 12, 3, groups=3, kept=2)
    clean = kernel(provider, variant)(hidden, weight, *arguments)
    hidden[2, 7] = bad
    spoilt = kernel(provider, variant)(hidden, weight, *arguments)
    reference = default_registry().op("router", variant).reference(hidden, weight, *arguments)
    others = torch.tensor([0, 1, 3, 4])
    for before, after, expected in zip(clean, spoilt, reference, strict=True):
        assert torch.equal(before[others], after[others])
        assert torch.equal(after[2].isnan(), expected[2].isnan())
    picked = spoilt[2][2].tolist()
    assert len(set(picked)) == 3 and all(0 <= expert < 12 for expert in picked)


def test_the_expert_whose_score_is_no_number_is_picked_first(provider: CpuProvider) -> None:
    """As torch.topk does: a NaN is the largest."""
    weight = torch.arange(6.0)[:, None].contiguous()
    weight[2] = float("nan")
    arguments = (torch.ones(1, 1), weight, torch.zeros(6), 2, 3, 2, False, 1.0)
    _, weights, indices = kernel(provider, "grouped_sigmoid")(*arguments)
    reference = default_registry().op("router", "grouped_sigmoid").reference(*arguments)
    assert indices.tolist() == reference[2].tolist() == [[2, 5]]
    assert torch.allclose(weights, reference[1], equal_nan=True)


def test_no_tokens_are_left_to_the_reference(provider: CpuProvider, variant: str) -> None:
    found = provider.implementation("router", variant)
    assert found is not None
    assert "empty" in str(found.accepts(torch.ones(0, 8), torch.ones(4, 8), *settings(variant, 4, 2)))


def test_groups_of_a_softmax_are_chosen_by_their_best_expert(provider: CpuProvider) -> None:
    """Group 0 has the best expert, group 1 the best sum: only group 0 is picked from, and then nothing weighs in."""
    weight = torch.tensor([[3.0], [-9.0], [2.5], [2.6]])
    route = kernel(provider, "grouped_softmax")
    _, weights, indices = route(torch.ones(1, 1), weight, 3, 2, 1, 4.0)
    assert indices[0, :2].tolist() == [0, 1]
    scores = torch.softmax(weight[:, 0], dim=0)
    assert torch.allclose(weights, 4 * torch.tensor([[float(scores[0]), float(scores[1]), 0.0]]))
