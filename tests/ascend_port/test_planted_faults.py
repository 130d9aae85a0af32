"""Faults planted in exports for Ascend: each is refused in words, or found where it is and named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.ascend_faults.fault import Edit, Fault, Found, Refused
from benchmarks.ascend_faults.judge import judge
from benchmarks.ascend_faults.table import FAULTS, page
from benchmarks.ascend_faults.workshop import Workshop

QUICK = frozenset(
    (
        "norm-epsilon-left-out",
        "gate-second",
        "sine-before-cosine",
        "scale-left-out",
        "mask-polarity",
        "mask-of-keys-alone",
        "key-heads-default",
        "key-heads-tiled",
        "not-renormalised",
        "prefix-sums-for-counts",
        "expert-weight-not-transposed",
        "row-index-scattered",
    )
)
"""What every run plants, on two exports; -m slow plants all."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    torch.set_num_threads(1)
    return Workshop(tmp_path_factory.mktemp("planted"))


def check(fault: Fault, workshop: Workshop) -> None:
    outcome = judge(fault, workshop)
    assert outcome.met, outcome.line()


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.id in QUICK], ids=lambda fault: fault.id)
def test_a_planted_fault_is_refused_or_found(fault: Fault, workshop: Workshop) -> None:
    check(fault, workshop)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.id not in QUICK], ids=lambda fault: fault.id)
def test_every_planted_fault_is_refused_or_found(fault: Fault, workshop: Workshop) -> None:
    check(fault, workshop)


def test_the_table_has_a_fault_for_each_trap() -> None:
    assert len(FAULTS) >= 24 and len({fault.id for fault in FAULTS}) == len(FAULTS)
    assert QUICK < {fault.id for fault in FAULTS}
    assert sum(isinstance(fault.expected, Refused) for fault in FAULTS) >= 24
    assert sum(isinstance(fault.expected, Found) for fault in FAULTS) >= 20


def test_a_text_that_is_not_there_once_is_not_planted(tmp_path: Path) -> None:
    (tmp_path / "modeling_x.py").write_text("a a")
    with pytest.raises(LookupError, match="2 times 'a', which must stand there once"):
        Edit("modeling_", "a", "b").plant(tmp_path)
    with pytest.raises(LookupError, match="has no file kernels"):
        Edit("kernels", "a", "b").plant(tmp_path)


def test_the_page_says_what_became_of_each() -> None:
    text = (Path(__file__).parents[2] / "docs" / "ascend_faults.md").read_text()
    assert [fault.id for fault in FAULTS if f"| {fault.id} |" not in text] == []
    assert "| missed |" not in text and page(()).startswith(text.splitlines()[0])
