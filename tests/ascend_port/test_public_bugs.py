"""The 26 public bugs of Ascend ports: a minimal faulty port of each is caught, or the reason why it cannot be shown."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from faulty_ports import PORTS, Calling, FaultyPort, H, Port, T, grouped, normed

from porter.ascend_lint.finding import LintedFault
from porter.ascend_lint.lint import lint_model
from porter.chips.catalogue import load_catalogue
from porter.kernels.ascend.emulator.stand_in import emulated_npu

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ascend_faults.table import FAULTS

CHIP = "ascend-910b"
PLANTED = {
    1: "indexer-turned-as-neighbours",
    4: "offset-not-corrected",
    14: "weight-not-transposed",
    22: "router-narrow",
}
"""Caught in a whole export: fault of benchmarks/ascend_faults."""
ELSEWHERE = {
    16: "cause reduction-missing: tests/alignment/model_faults.py",
    20: "cause nondeterminism: tests/alignment/model_faults.py, for a module; an all-reduce needs several ranks",
    24: "rules missing-entry and mixed-types: tests/ascend_v1/planted_traps.py",
}
NOT_SHOWN = {
    19: "attention workspaces that layers share in graph mode: nothing of a graph is run without a chip",
    23: "an all-reduce over rows of different tokens: needs ranks that hold different tokens",
}


def findings(port: FaultyPort) -> list[LintedFault]:
    torch.manual_seed(0)
    stored = {name: "F32" for name in port.stored}
    with emulated_npu(CHIP) as emulator:
        model = Port(Calling(port.call, **port.held()))
        hidden = port.hidden()

        def run() -> object:
            return [model(hidden) for _ in range(port.runs)]

        chip = load_catalogue().get(CHIP)
        return lint_model(model, port.config, chip, emulator, run, stored)


@pytest.mark.parametrize("port", PORTS, ids=lambda port: port.id)
def test_a_faulty_port_is_caught(port: FaultyPort) -> None:
    found = findings(port)
    caught = [finding for finding in found if finding.rule == port.rule]
    assert caught and port.words in caught[0].line(), [finding.line() for finding in found]


@pytest.mark.parametrize("bug", sorted(PLANTED), ids=lambda bug: f"{bug}: {PLANTED[bug]}")
def test_others_are_planted_in_exports(bug: int) -> None:
    assert [fault for fault in FAULTS if fault.id == PLANTED[bug]]


def test_every_bug_is_accounted_for() -> None:
    shown = {int(port.id.partition(":")[0]) for port in PORTS if port.id[0].isdigit()}
    assert shown | set(PLANTED) | set(ELSEWHERE) | set(NOT_SHOWN) == set(range(1, 27))
    assert not (shown | set(PLANTED)) & set(NOT_SHOWN) and len(shown) >= 18


def sound(port: str, **changed: object) -> list[LintedFault]:
    wanted = next(p for p in PORTS if p.id.startswith(port))
    return findings(dataclasses.replace(wanted, **changed))  # type: ignore[arg-type]


def test_sound_ports_have_no_findings() -> None:
    assert sound("5:", stored=()) == []
    assert sound("11:", config={"max_position_embeddings": 128}) == []
    assert sound("10:", call=lambda self, hidden: hidden) == []
    counts = torch.tensor([3, 2, 1, 2])
    assert sound("2:", call=lambda self, hidden: grouped(hidden, self.weight, counts)) == []


def test_epsilon_is_the_modules_own_before_the_configs() -> None:
    other = sound("5:", stored=(), config={"rms_norm_eps": 1e-5})
    assert [(f.rule, f.expected) for f in other] == [("epsilon", "1e-05")]

    def own(self: object, hidden: torch.Tensor) -> object:
        self.variance_epsilon = 1e-6  # type: ignore[attr-defined]
        return normed(self, hidden)

    assert sound("5:", stored=(), config={"rms_norm_eps": 1e-5}, call=own) == []


def test_dtypes_that_a_chip_has_not() -> None:
    with emulated_npu(CHIP) as emulator:
        model = Port(Calling(normed))
        stored = {"a.weight": "F8_E4M3", "b.weight": "F8_E4M3", "c.weight": "BF16"}
        run = lambda: model(torch.randn(T, H).bfloat16())  # noqa: E731
        found = lint_model(model, {}, load_catalogue().get(CHIP), emulator, run, stored)
    assert [f.found for f in found if f.rule == "chip-dtype"] == ["float8_e4m3fn"]
