"""The measures that verdicts rest on: errors, weights, routing margins, forcing, precision, tokens."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from porter.alignment.budget import Noise, allowance, judged_native
from porter.alignment.forcing import ForcedCall, forcing
from porter.alignment.observation import cosine, relative, tensors
from porter.alignment.precision_swap import exact, swapped, to_float64
from porter.alignment.report import Report, WeightRow
from porter.alignment.routing import Choice, choice_of, flips
from porter.alignment.tokens import TokenCount
from porter.alignment.weight_judgement import judge
from porter.alignment.weights import WeightPairing
from porter.correspondence import Correspondence, Entry


def test_relative_error_is_l2_against_the_reference() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert relative(reference + torch.tensor([0.3, 0.4]), reference) == pytest.approx(0.1, rel=1e-6)
    assert relative(reference.view(1, 2), reference.view(1, 1, 2)) == 0.0
    assert relative(torch.zeros(3), reference) == math.inf
    assert relative(torch.tensor([math.nan, 4.0]), reference) == math.inf
    assert relative(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative(torch.ones(2), torch.zeros(2)) == math.inf
    assert relative(torch.tensor([-math.inf, 1.0]), torch.tensor([-math.inf, 1.0])) == 0.0
    assert relative(torch.zeros(0), torch.zeros(0)) == 0.0
    assert cosine(-reference, reference) == pytest.approx(-1.0)
    assert cosine(torch.zeros(2), reference) is None


def test_labels_of_nested_outputs() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    labels = dict(tensors((one, None, {"hidden": (two, three)}), "output"))
    assert list(labels) == ["output", "output.2.hidden", "output.2.hidden.1"]


class Holder(nn.Module):
    def __init__(self, **parameters: torch.Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value, requires_grad=False))


def judged(candidate: torch.Tensor, source: torch.Tensor, compute: torch.dtype, **more: torch.Tensor) -> WeightRow:
    pairing = WeightPairing(
        Holder(weight=candidate, **more), Holder(weight=source), Correspondence(), compute, source.dtype
    )
    (weight,) = pairing
    return judge(weight).row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounding_to_the_compute_dtype_is_no_fault(dtype: torch.dtype) -> None:
    source = torch.randn(31, 17)
    assert judged(source.to(dtype), source, dtype).status == "ok"
    wrong = source.to(dtype, copy=True)
    wrong[3, 5] *= 1.02
    assert judged(wrong, source, dtype).status == "drift"


def test_narrowing_is_a_fault_where_the_precision_is_the_goldens() -> None:
    source = torch.randn(64)
    assert judged(source.bfloat16(), source, torch.float32).status == "drift"


@pytest.mark.parametrize("shape", [(7, 33), (3, 5, 16)])
def test_int8_costs_what_its_scale_says(shape: tuple[int, ...]) -> None:
    source = torch.randn(shape)
    scale = source.abs().amax(dim=-1) / 127
    quantized = (source / scale[..., None]).round().to(torch.int8)
    assert judged(quantized, source, torch.bfloat16, weight_scale=scale).status == "ok"
    assert judged(quantized, source, torch.bfloat16, weight_scale=scale * 1.05).status == "drift"
    coarse = (quantized // 8 * 8).to(torch.int8)
    assert judged(coarse, source, torch.bfloat16, weight_scale=scale).status == "drift"


def test_fused_rows_are_judged_part_by_part() -> None:
    entry = Entry("qkv", ("q", "k"), (2, 3))
    q, k = torch.randn(2, 4), torch.randn(3, 4)
    candidate, source = nn.Module(), nn.Module()
    candidate.qkv = Holder(weight=torch.cat([q, 2 * k]))
    source.q, source.k = Holder(weight=q), Holder(weight=k)
    pairing = WeightPairing(candidate, source, Correspondence((entry,)), torch.float32, torch.float32)
    rows = {row.source: row for row in (judge(weight).row for weight in pairing)}
    assert rows["q.weight"].status == "ok"
    assert (rows["k.weight"].status, rows["k.weight"].error) == ("drift", pytest.approx(1.0))


def test_missing_and_misshapen_parameters() -> None:
    source = Holder(weight=torch.randn(4, 6))
    pairing = WeightPairing(Holder(other=torch.ones(2)), source, Correspondence(), torch.float32, torch.float32)
    assert [judge(weight).row.status for weight in pairing] == ["skipped"]
    assert judged(torch.randn(6, 4), torch.randn(4, 6), torch.float32).error == math.inf


def choice(*experts: list[int], logits: Any = None) -> Choice:
    return Choice(torch.tensor(experts), 4, None if logits is None else torch.tensor(logits))


def test_flips_are_benign_only_within_the_margin() -> None:
    router: Any = SimpleNamespace()
    logits = [[3.0, 2.0, 1.999, 0.0], [3.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0]]
    oracle = choice([0, 1], [0, 1], [0, 1], logits=logits)
    mine = choice([2, 0], [2, 0], [1, 0])
    found = flips(router, mine, oracle, noise=0.01)
    assert found.flipped.tolist() == [True, True, False]
    assert found.benign.tolist() == [True, False, False]


def test_flipped_groups_are_benign_where_the_groups_are_near() -> None:
    router: Any = SimpleNamespace(num_group=2, topk_group=1)
    oracle = choice([0, 1], [0, 1], logits=[[2.0, 1.0, 2.5, 0.499], [2.0, 1.0, 1.0, 0.5]])
    found = flips(router, choice([2, 3], [2, 3]), oracle, noise=0.01)
    assert found.benign.tolist() == [True, False]


def test_order_of_the_experts_does_not_matter() -> None:
    weights = torch.tensor([[0.7, 0.3]])
    outputs = [(weights, torch.tensor([[2, 0]])), (weights.flip(1), torch.tensor([[0, 2]]))]
    dense = [choice_of(nn.Linear(1, 1), output)[1]["output.combine"] for output in outputs]
    assert torch.equal(*dense)


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x + 1) * 2


def test_forced_children_give_the_recorded_output_and_are_put_back() -> None:
    parent, x, given = Parent(), torch.randn(2, 3), torch.randn(2, 3)
    before = parent(x)
    with forcing(parent, {"child": [ForcedCall(((2, 3),), given)]}) as seen:
        assert torch.equal(parent(x), given * 2)
    assert torch.equal(seen.tensors["child.input"], x + 1)
    assert seen.called == {"child": 1} and not seen.otherwise
    assert torch.equal(parent(x), before)


def test_a_child_called_otherwise_runs_and_is_named() -> None:
    parent, x = Parent(), torch.randn(5, 3)
    with forcing(parent, {"child": [ForcedCall(((2, 3),), torch.zeros(2, 3))]}) as seen:
        forced = parent(x)
    assert forced.shape == (5, 3)
    assert seen.otherwise == {"child"}


def test_swapping_precision_restores_every_tensor_also_after_an_error() -> None:
    parent = Parent()
    weight = parent.child.weight
    with pytest.raises(RuntimeError, match="stop"), exact(parent):
        assert parent.child.weight.dtype == torch.float64
        assert parent(torch.ones(1, 3, dtype=torch.float64)).dtype == torch.float64
        raise RuntimeError("stop")
    assert parent.child.weight is weight
    with swapped(parent, to_float64, leave=[parent.child]):
        assert parent.child.weight is weight


def test_tokens_agree_and_diverge() -> None:
    golden = torch.log(torch.tensor([[0.9, 0.1], [0.6, 0.4]]))
    count = TokenCount()
    count.add(golden, golden)
    count.add(torch.log(torch.tensor([[0.9, 0.1], [0.4, 0.6]])), golden)
    result = count.result()
    assert result is not None
    assert (result.compared, result.top1_agreement, result.first_divergence) == (4, 0.75, 3)
    expected = 0.6 * math.log(0.6 / 0.4) + 0.4 * math.log(0.4 / 0.6)
    assert result.kl_max == pytest.approx(expected, rel=1e-6)
    assert result.kl_mean == pytest.approx(expected / 4, rel=1e-6)
    assert TokenCount().result() is None


def test_report_is_json_without_infinities() -> None:
    report = Report("drift", weights=[WeightRow("a", "a", math.inf, math.nan, "drift")])
    row = report.to_json()["weights"][0]
    assert row["error"] == 1e308 and row["expected"] is None


@pytest.mark.parametrize("elements", [7, 16, 31, 64, 257])
@pytest.mark.parametrize("rounded", [True, False], ids=["errors of rounded values", "errors of sums"])
def test_the_largest_of_many_noise_ratios_is_allowed(elements: int, rounded: bool) -> None:
    generator, probes = torch.Generator().manual_seed(elements), 50_000
    errors = torch.randn(2, probes, elements, generator=generator)
    if rounded:
        errors *= torch.rand(2, probes, elements, generator=generator)
    norms = errors.norm(dim=-1)
    largest, allowed = float((norms[0] / norms[1]).max()), allowance(elements, probes)
    assert largest <= allowed
    assert not rounded or largest > allowed**0.5, "the bound is no wider than it must be"


def test_many_probes_allow_more_of_small_tensors_alone() -> None:
    def budget(elements: int, noise: float, probes: int) -> float:
        exact = {"output": torch.ones(elements, dtype=torch.float64)}
        (verdict,) = judged_native(exact, exact, {"output": Noise(noise, 0.0)}, 2.0, 0.0, probes=probes)
        return verdict.budget

    assert [budget(elements, 1e-3, 1) for elements in (1, 16, 10**5)] == [2e-3] * 3
    assert budget(136, 1e-3, 100_000) == 2e-3 < budget(130, 1e-3, 100_000)
    assert budget(16, 1e-3, 100) < budget(16, 1e-3, 10_000) < budget(8, 1e-3, 10_000)
    assert budget(1, 1e-3, 10_000) == 1.0, "no tensor may differ by its own size"
