"""`porter chips --ops`: what it prints is asked of the providers, never assumed."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console

from porter.adaptation import plan_port
from porter.chips.catalogue import load_catalogue
from porter.cli import app
from porter.cli.op_table import op_rows, print_ops
from porter.kernels.contract import Evidence, Implementation
from porter.kernels.registry import OpRegistry, default_registry


class FloatsOnly:
    """A provider of one Op, which takes float32 alone."""

    name = "cpu"

    def supported(self, chip_name: str) -> str | None:
        return None if chip_name.startswith("cpu-x86") else "needs an x86 CPU"

    def implementation(self, name: str, variant: str, chip_name: str = "cpu") -> Implementation | None:
        if (name, variant) != ("swiglu", "standard"):
            return None
        evidence = Evidence("measured", "tests", "2026-11-30", "some CPU")
        return Implementation(self._call, lambda x: None if x.dtype == torch.float32 else "dtype", evidence)

    _call: Callable[..., Any] = staticmethod(lambda gate_up: gate_up)


@pytest.fixture
def registry() -> OpRegistry:
    known = default_registry()
    ops = [known.op("swiglu", "standard"), known.op("rms_norm", "standard")]
    return OpRegistry.of(ops, [FloatsOnly()])


def test_rows_say_what_the_provider_accepts_and_its_evidence(registry: OpRegistry) -> None:
    rows = op_rows(load_catalogue().get("cpu-x86-avx2"), registry)
    assert [(row["op"], row["provider"]) for row in rows] == [
        ("swiglu", "cpu"),
        ("swiglu", "reference"),
        ("rms_norm", "cpu"),
        ("rms_norm", "reference"),
    ]
    swiglu, reference, rms_norm, _ = rows
    assert swiglu["dtypes"] == ["float32"]
    assert swiglu["evidence"] == {"rung": "measured", "detail": "tests", "date": "2026-11-30", "device": "some CPU"}
    assert swiglu["refused"] is None
    assert "bfloat16" in reference["dtypes"] and reference["evidence"] is None
    assert rms_norm["dtypes"] == [] and "no kernel for rms_norm/standard" in rms_norm["refused"]


def test_a_chip_without_providers_has_the_reference_alone(registry: OpRegistry) -> None:
    rows = op_rows(load_catalogue().get("cambricon-mlu590"), registry)
    assert {row["provider"] for row in rows} == {"reference"}


def test_an_ascend_chip_names_the_vendor_s_operators_and_what_they_need() -> None:
    rows = {(r["op"], r["variant"]): r for r in op_rows(load_catalogue().get("ascend")) if r["provider"] == "ascend"}
    norm = rows["rms_norm", "standard"]
    assert norm["calls"] == ["npu_rms_norm"] and "bfloat16" in norm["dtypes"] and "float64" not in norm["dtypes"]
    (operator,) = norm["operators"]
    assert "gamma to have the last dimensions of input" in operator["constraints"]
    assert operator["explicit"] == ["epsilon"] and operator["page"].endswith("README.md")
    assert rows["linear", "w8a8"]["calls"] == ["npu_dynamic_quant", "npu_quant_matmul"]
    assert "float64" not in rows["attention", "gqa"]["dtypes"]  # Empty inputs alone are taken in float64.
    streams = rows["hyper_connection", "collapse"]
    assert (streams["dtypes"], streams["evidence"]) == ([], None) and "only ascend-950" in streams["refusal"]
    assert rows["linear", "standard"]["calls"] == [] and rows["linear", "standard"]["dtypes"]
    assert {row["evidence"]["rung"] for row in rows.values() if row["evidence"]} <= {"declared", "schema", "emulated"}


def test_the_page_of_an_ascend_chip_lists_each_operator_once() -> None:
    chip = load_catalogue().get("ascend")
    page = Console(file=io.StringIO(), width=200)
    print_ops(page, chip, op_rows(chip))
    text = page.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("npu_rms_norm (") == 1 and "vendor's operators" in text
    assert "npu_dynamic_quant, npu_quant_matmul" in text and "always passed, whatever the default: epsilon" in text


def test_the_command_covers_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["chips", "ascend", "--ops", "--json"]) == 0
    (chip,) = json.loads(capsys.readouterr().out)["chips"]
    assert {(row["op"], row["variant"]) for row in chip["ops"]} == set(default_registry().ops)
    assert app.run(["chips", "ascend", "--ops"]) == 0
    text = capsys.readouterr().out
    assert "rms_norm/standard" in text and "defines the Op" in text


def test_the_table_says_once_what_the_evidence_rests_on(registry: OpRegistry) -> None:
    chip = load_catalogue().get("cpu-x86-avx2")
    page = Console(file=io.StringIO(), width=200)
    print_ops(page, chip, op_rows(chip, registry))
    text = page.file.getvalue()  # type: ignore[attr-defined]
    assert "vendor's operators" not in text
    assert "measured (1)" in text and text.count("tests, 2026-11-30, some CPU") == 1
    assert "cpu has no kernel for rms_norm/standard" in text


def test_a_port_claims_no_kernel_that_no_document_gives_its_chip() -> None:
    """DeepSeek-V4's hyper-connections have operators on the 950; clamped experts have them on the 910B."""
    wanted = ("hyper_connection", "collapse"), ("experts", "clamped"), ("linear", "standard")
    plans = {}
    for chip in ("ascend-910b", "ascend-950"):
        port = plan_port("tiny-deepseek-v4", chip)
        plans[chip] = {(op.op, op.variant): op for op in port.plan.ops}
    found = {chip: tuple(ops[key].provider for key in wanted) for chip, ops in plans.items()}
    assert found == {"ascend-910b": ("reference", "ascend", "ascend"), "ascend-950": ("ascend", "reference", "ascend")}
    assert "only ascend-950" in plans["ascend-910b"]["hyper_connection", "collapse"].refused[0]
