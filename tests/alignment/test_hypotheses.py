"""Every planted fault is named by its cause, and by no other; within rounding noise too."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from module_faults import FAULTS, Fault
from small_modules import FLOOR, QWEN3, drift_between, drift_of, layer, plain_calls

from porter.alignment.hypotheses.catalogue import CATALOGUE, explain
from porter.alignment.report import Cause

SCHEMA = json.loads((Path(__file__).parents[1] / "alignment.schema.json").read_text())
KINDS = SCHEMA["properties"]["causes"]["items"]["properties"]["kind"]["enum"]


def causes_of(fault: Fault, floor: float = FLOOR) -> list[Cause]:
    return explain(drift_of(fault.family, fault.path, fault.plant, floor))


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_named(name: str) -> None:
    fault = FAULTS[name]
    causes = causes_of(fault)
    first = causes[0]
    assert first.kind == fault.kind, causes
    assert [c.confidence for c in causes] == sorted((c.confidence for c in causes), reverse=True)
    if first.kind not in ("unknown", "nan-origin", "overflow"):
        assert first.after is not None and first.after <= FLOOR < first.before
        assert first.confidence >= 0.5
        others = {c.kind for c in causes[1:]}
        assert not others or all(other in first.says for other in others), "a tie says so"
    assert len(first.says) > 20 and first.says[0] not in " :"


def test_catalogue_reports_only_kinds_of_the_contract() -> None:
    reported = {kind for hypothesis in CATALOGUE for kind in hypothesis.kinds}
    assert reported <= set(KINDS)
    assert {fault.kind for fault in FAULTS.values()} <= reported
    assert CATALOGUE[-1].kinds == ("unknown",)


def test_unknown_is_what_is_left_and_never_sure() -> None:
    causes = causes_of(FAULTS["something else"])
    assert all(cause.confidence < 0.5 for cause in causes)
    assert causes[-1].kind == "unknown" or causes[0].kind == "unknown"


def test_no_hypothesis_changes_the_source() -> None:
    for name in ("eps of k_norm", "yarn mscale left out", "router bias leaked"):
        fault = FAULTS[name]
        drift = drift_of(fault.family, fault.path, fault.plant)
        before = {key: value.clone() for key, value in drift.source_module.state_dict().items()}
        explain(drift)
        after = drift.source_module.state_dict()
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
        assert drift.distance(drift.run(drift.source_module)) == drift.before, "hooks or attributes were left behind"


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        ("model.layers.1.mlp.gate_proj.weight", "gate-up-swapped"),
        ("model.layers.2.mlp.up_proj.weight", "weight-stale"),
        ("lm_head.weight", "tied-embedding"),
    ],
)
def test_parameter_of_another_module_is_recognised(other: str, kind: str) -> None:
    source = layer("qwen3").get_submodule("mlp.up_proj")
    candidate = copy.deepcopy(source)
    wrong = torch.randn(source.weight.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    candidate.weight.data.copy_(wrong)
    elsewhere = {"model.norm.weight": torch.ones(3), "model.layers.3.mlp.up_proj.weight": 1 + wrong, other: wrong}
    drift = drift_between(
        source, candidate, plain_calls(48), QWEN3, "mlp.up_proj", elsewhere=elsewhere
    )  # fmt: skip
    first = explain(drift)[0]
    assert (first.kind, first.after) == (kind, 0.0)
    assert other in first.says


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, "constant-ratio"), (torch.float32, "constant-ratio")])
def test_relation_survives_the_rounding_of_storage(dtype: torch.dtype, kind: str) -> None:
    source = layer("qwen3").get_submodule("self_attn.o_proj")
    source.weight.data.copy_(source.weight.data.to(dtype))
    stored = copy.deepcopy(source).to(dtype)
    stored.weight.data.mul_(1.02)
    drift = drift_between(source, copy.deepcopy(stored).double(), plain_calls(64), QWEN3, "self_attn.o_proj")
    causes = explain(dataclasses.replace(drift, candidate_module=stored))
    assert (causes[0].kind, len(causes)) == (kind, 1)
    assert causes[0].confidence >= 0.5 and "1.02" in causes[0].says
