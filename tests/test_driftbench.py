"""DriftBench itself: many cases of every kind, a yardstick of its own, and a handful of them answered."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.drift import faults_state, legitimate, quantized
from benchmarks.drift.case import Case, fault_cases
from benchmarks.drift.families import FAMILIES
from benchmarks.drift.judge import Outcome, candidate_of, judge, over_the_floor
from benchmarks.drift.layers import Attend, Route, mix
from benchmarks.drift.run import all_cases, quiet, selected
from benchmarks.drift.score import mark, markdown, summary
from benchmarks.drift.workshop import Workshop

NOT_PLANTED = {"unknown"}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    threads = torch.get_num_threads()
    quiet()
    torch.set_num_threads(threads)
    return Workshop(tmp_path_factory.mktemp("drift"), seed=0)


def case_of(id: str) -> Case:
    return next(case for case in all_cases(0) if case.id == id)


def test_enough_cases_of_every_kind_and_family() -> None:
    faults, legit = list(fault_cases(faults_state.FAULTS, 0)), list(legitimate.cases(0))
    assert len(faults) >= 100 and len(legit) >= 60
    assert len({case.id for case in [*faults, *legit]}) == len(faults) + len(legit)
    assert {case.family.name for case in faults} == set(FAMILIES) == {case.family.name for case in legit}
    kinds = [kind for case in faults for kind in case.kinds]
    text = (Path(__file__).parents[1] / "benchmarks" / "drift").glob("faults_*.py")
    assert all(kinds.count(kind) >= 2 for kind in set(kinds)), "each planted kind more than once"
    assert len(set(kinds) - NOT_PLANTED) >= 48 and any(text)
    assert sum(case.fault is not None and case.fault.scope == "all" for case in faults) >= 15
    assert sum(case.fault is not None and case.fault.second is not None for case in faults) >= 10


def test_cases_follow_the_seed_and_the_selection() -> None:
    def drawn(seed: int) -> dict[str, tuple[str, int]]:
        return {case.id: (case.pair, case.seed) for case in fault_cases(faults_state.FAULTS, seed)}

    assert drawn(0) == drawn(0) and drawn(0).keys() == drawn(1).keys() and drawn(0) != drawn(1)
    chosen = selected(all_cases(0), ["qwen3"], ["rope-interleaved", "legit-same*"])
    assert [case.id for case in chosen] == [
        "rope-interleaved/qwen3",
        *(f"legit-same-{pair}/qwen3" for pair in ("fp32-fp32", "bf16-bf16", "fp32-bf16")),
    ]


@pytest.mark.parametrize(
    "id",
    ["act-gelu/qwen3", "router-bias-leaks/deepseek_v3"],
)
def test_planted_faults_are_found_and_named(workshop: Workshop, id: str) -> None:
    outcome = judge(case_of(id), workshop, limit=120.0)
    assert outcome.counts and outcome.located and outcome.explained, outcome


def test_a_legitimate_port_is_aligned(workshop: Workshop) -> None:
    assert mark(judge(case_of("legit-same-fp32-bf16/qwen3"), workshop, limit=120.0)) == "aligned"


def test_the_yardstick_is_one_for_a_healthy_candidate(workshop: Workshop) -> None:
    case = case_of("rope-interleaved/qwen3")
    _, expectation = candidate_of(case, workshop)
    _, nothing = over_the_floor(case, workshop, workshop.healthy(case), expectation)
    assert nothing <= 1.0


def test_planting_leaves_the_healthy_candidate_alone(workshop: Workshop) -> None:
    case = case_of("transposed-square/qwen3")
    before = {name: value.clone() for name, value in workshop.healthy(case).state_dict().items()}
    candidate_of(case, workshop)
    assert all(torch.equal(value, before[name]) for name, value in workshop.healthy(case).state_dict().items())


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("queries", [1, 7])
def test_attention_without_a_twist_is_attention(window: int | None, queries: int) -> None:
    query, key, value = (torch.randn(2, heads, n, 8).double() for heads, n in ((4, queries), (2, 7), (2, 7)))
    place = torch.arange(7 - queries, 7)[:, None] - torch.arange(7)
    seen = (place >= 0) & (place < (window or 8))
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen, scale=0.3, enable_gqa=True)
    found = Attend()(query, key, value, None, 0.3, window)
    torch.testing.assert_close(found, wanted.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_router_and_experts_without_a_twist_are_upstreams() -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = FAMILIES["deepseek_v3"].config()
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    block = DeepseekV3MoE(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(9, config.hidden_size)
    gate = block.gate
    settings = (gate.top_k, gate.num_group, gate.topk_group, gate.norm_topk_prob, gate.routed_scaling_factor)
    logits, weights, index = Route().sigmoid(x, gate.weight, gate.e_score_correction_bias, *settings)
    wanted_logits, wanted_weights, wanted_index = gate(x)
    torch.testing.assert_close(logits, wanted_logits)
    torch.testing.assert_close(weights.sort().values, wanted_weights.sort().values)
    mixed = mix(x, index, weights, block.experts.gate_up_proj, block.experts.down_proj)
    torch.testing.assert_close(mixed, block.experts(x, wanted_index, wanted_weights), rtol=1e-4, atol=1e-5)


def test_quantized_checkpoints_hold_their_weights() -> None:
    weight = torch.randn(64, 96)
    codes, scale = quantized.to_blocks(weight)
    assert scale.shape == (2, 3) and torch.equal(codes, codes.to(torch.float8_e4m3fn).float())
    # e4m3 has 3 mantissa bits: half a step is 2^-4 of the value, and the smallest steps are absolute.
    torch.testing.assert_close(quantized.blocked(codes, scale), weight, rtol=2**-4, atol=float(scale.max()) * 2**-9)
    codes, scale, zero = quantized.to_groups(weight)
    assert codes.min() >= 0 and codes.max() <= 15 and torch.equal(codes, codes.round())
    assert float((quantized.grouped(codes, scale, zero) - weight).abs().max()) <= 1.01 * float(scale.max())


def test_scores_count_what_they_say() -> None:
    def outcome(id: str, fault: bool, excess: float, verdict: str, first: str | None, *causes: str) -> Outcome:
        return Outcome(id, "qwen3", "fp32-fp32", fault, (("m",),), ("norm-eps",), excess, verdict, first, causes, 1.0)

    found = summary(
        [
            outcome("right", True, 9.0, "drift", "m", "norm-eps"),
            outcome("cause", True, 9.0, "drift", "m", "unknown", "norm-eps"),
            outcome("module", True, 9.0, "drift", "n", "norm-eps"),
            outcome("missed", True, 9.0, "aligned", None),
            outcome("small", True, 1.5, "aligned", None),
            outcome("fine", False, 0.0, "aligned", None),
            outcome("alarm", False, 0.0, "incomparable", None),
        ]
    )
    counts = ("faults", "over_twice_the_floor", "detected", "located", "explained", "legitimate", "false_alarms")
    assert [found[name] for name in counts] == [5, 4, 3, 2, 2, 2, 1]
    assert [each.split()[0] for each in found["misjudged"]] == ["WRONG", "WRONG", "MISSED", "FALSE"]
    assert "3 of 4 (75.0 %)" in markdown(found)
