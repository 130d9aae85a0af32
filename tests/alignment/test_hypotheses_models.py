"""Every planted fault is named by its own kind and no other, in models of transformers as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import planted
import pytest
import tiny_models
import torch
from model_faults import FAULTS, Fault

from porter.alignment.align import align
from porter.golden.capture import capture

MODELS = {
    "qwen2": planted.qwen2, "deepseek_v3": planted.deepseek_v3, "deepseek_v2": tiny_models.deepseek_v2,
    "qwen3_moe": tiny_models.qwen3_moe, "qwen3_next": tiny_models.qwen3_next,
}  # fmt: skip
LENGTHS = (20, 13)

Recorded = tuple[Any, Any]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Fault], Recorded]:
    """(model, golden) of a fault's family, dtype and padding; made once."""
    made: dict[Any, Recorded] = {}

    def get(fault: Fault) -> Recorded:
        key = (fault.family, fault.dtype, fault.padded)
        if key not in made:
            made[key] = _recorded(fault, tmp_path_factory.mktemp(fault.family))
        return made[key]

    torch.set_num_threads(1)
    return get


def _recorded(fault: Fault, folder: Path) -> Recorded:
    model: Any = MODELS[fault.family]()
    model = model if fault.dtype is None else model.to(fault.dtype)
    if not fault.padded:
        return model, planted.golden_of(model, folder / "golden")
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(0, 128, (length,), generator=generator).tolist() for length in LENGTHS]
    return model, capture(model, tokens, folder / "golden", new_tokens=3, batch_size=len(tokens))


def _report(fault: Fault, model: Any, golden: Any, passes: Any) -> Any:
    candidate = copy.deepcopy(model)
    with torch.no_grad():
        fault.plant(candidate)
    # The module alone: what else drifts because of it is for the tests of locating.
    selected = f"^{fault.module}$"
    return align(golden, candidate, source=copy.deepcopy(model), modules=selected, passes=passes)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named_and_nothing_else(name: str, recorded: Callable[[Fault], Recorded]) -> None:
    fault = FAULTS[name]
    report = _report(fault, *recorded(fault), ("weights", "replay"))
    assert report.first_drift is not None and report.first_drift.module == fault.module
    causes = [cause for cause in report.causes if cause.kind != "low-precision" or fault.kind == "low-precision"]
    first = causes[0]
    assert first.kind == fault.kind, causes
    assert first.confidence >= (0.6 if not fault.ties else 0.99 / (1 + len(fault.ties)) - 0.01)
    if first.after is not None and fault.kind != "nondeterminism":
        assert first.after < first.before / 2
    named = {cause.kind for cause in report.causes if cause.after is not None and cause.confidence > 0.1}
    assert named == {fault.kind, *fault.ties}, "no other hypothesis explains it"
    assert all(tie in first.says for tie in fault.ties), "a tie says so"


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.weights])
def test_weights_pass_names_it_alone(name: str, recorded: Callable[[Fault], Recorded]) -> None:
    fault = FAULTS[name]
    report = _report(fault, *recorded(fault), "weights")
    assert report.first_drift is not None and report.first_drift.module == fault.module
    assert report.causes[0].kind == fault.kind, report.causes


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_moe", "deepseek_v2"])
def test_legitimate_bfloat16_has_no_cause(family: str, recorded: Callable[[Fault], Recorded]) -> None:
    model, golden = recorded(Fault("", family, "", lambda model: None))
    report = align(golden, copy.deepcopy(model).to(torch.bfloat16), source=copy.deepcopy(model))
    assert (report.verdict, [cause for cause in report.causes if cause.after is not None]) == ("aligned", [])
