"""What the checks before the comparison do to its verdict, from recordings, checkpoints and modules."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from planted import bfloat16, deepseek_v3, golden_of, qwen2

import porter
from porter.alignment.preliminary_checks import PreliminaryChecks
from porter.alignment.report import Coverage, FirstDrift, Report, SanityCheck
from porter.alignment.report_headline import headline
from porter.alignment.token_identity import tokenizer_check
from porter.alignment.verdict import Drifted
from porter.golden.capture import capture
from porter.golden.source import source_directory
from porter.golden.store import Golden
from porter.tokenization import encode, tokenizer_of

SCHEMA = json.loads((Path(__file__).parents[1] / "alignment.schema.json").read_text())
VOID = SanityCheck("token-ids", "", "invalid", "prompt 0: token 3 differs")
DRIFT = FirstDrift("a", "a", 0, "weight")


@pytest.mark.parametrize(
    ("verdict", "sanity", "drifts", "expected"),
    [
        ("aligned", [], [], "aligned"),
        ("aligned", [VOID], [], "incomparable"),
        ("drift", [VOID], [], "drift"),
        ("aligned", [], [Drifted((0, 1), DRIFT)], "drift"),
        ("incomparable", [], [Drifted((0, 1), DRIFT)], "drift"),
        ("aligned", [VOID], [Drifted((0, 1), DRIFT)], "drift"),
        ("aligned", [SanityCheck("gap", "x", "uncovered", "candidate: compiled")], [], "aligned"),
    ],
)
def test_verdicts(verdict: str, sanity: Any, drifts: Any, expected: str) -> None:
    known = FirstDrift("b", "b", 1) if verdict == "drift" else None
    report = PreliminaryChecks(sanity, [], drifts).applied(Report(verdict, known, coverage=Coverage(1.0, 1.0)))
    assert report.verdict == expected and report.sanity == sanity
    assert report.first_drift == (known or (DRIFT if expected == "drift" else None))


def test_recordings_of_other_tokens_are_incomparable_though_every_module_is_right(tmp_path: Path) -> None:
    model = qwen2()
    golden = golden_of(model, tmp_path / "golden")
    rows = torch.randint(0, 128, (2, 20), generator=torch.Generator().manual_seed(3))
    capture(bfloat16(model), torch.cat([torch.ones(2, 1).long(), rows], 1), tmp_path / "other", new_tokens=3)
    report = porter.align(golden, tmp_path / "other").to_json()
    jsonschema.validate(report, SCHEMA)
    assert report["verdict"] == "incomparable"
    assert "only the candidate begins with token 1" in headline(report)[1]
    assert {row["status"] for row in report["modules"]} <= {"ok", "flipped"}


@pytest.mark.parametrize("build", [qwen2, deepseek_v3])
def test_every_check_of_a_legitimate_pair_is_in_order(tmp_path: Path, build: Any) -> None:
    model = build()
    golden = golden_of(model, tmp_path / "golden")
    report = porter.align(golden, copy.deepcopy(model))
    assert report.verdict == "aligned"
    assert {check.status for check in report.sanity} == {"ok"} and not report.lint
    assert {check.check for check in report.sanity} >= {
        "token-ids",
        "layer-chain",
        "final-norm",
        "observer",
        "in-place",
    }


def test_the_observer_runs_only_where_the_candidate_is_run_whole(tmp_path: Path) -> None:
    model = qwen2()
    golden = golden_of(model, tmp_path / "golden")
    report = porter.align(golden, copy.deepcopy(model), passes="weights")
    assert "observer" not in {check.check for check in report.sanity} and report.sanity


def prompted(path: Path, text: str) -> tuple[Golden, Path]:
    directory = source_directory("tiny-qwen3")
    ids = encode(tokenizer_of(directory), text)
    model = qwen2()
    return capture(model, ids % 128, path, new_tokens=0, prompts=[text]), directory


def test_the_tokenizer_beside_a_candidate_is_asked_for_the_prompts(tmp_path: Path) -> None:
    text = "She had been forced"
    directory = source_directory("tiny-qwen3")
    ids = encode(tokenizer_of(directory), text)
    golden, _ = prompted(tmp_path / "golden", text)
    same = bool((ids < 128).all())
    (check,) = tokenizer_check(golden, directory)
    assert (check.check, check.status) == ("tokenizer", "ok" if same else "note")
    golden.manifest["tokens"] = golden.manifest["batches"][0]["tokens"] = [[0, *ids[0].tolist()]]
    (check,) = tokenizer_check(Golden(golden.path, golden.manifest, golden.records, {}), directory)
    assert check.status == "note" and "only the golden begins with token 0 (add_bos_token?)" in check.says


def test_without_prompts_or_a_tokenizer_nothing_is_said(tmp_path: Path) -> None:
    golden, _ = prompted(tmp_path / "golden", "She had")
    assert tokenizer_check(golden, tmp_path) == [] and tokenizer_check(golden, tmp_path / "nowhere") == []
    golden.manifest["prompts"] = None
    assert tokenizer_check(golden, source_directory("tiny-qwen3")) == []
