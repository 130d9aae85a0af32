"""What is said of a fault: the catalogue's refusal, or the aligner's module and cause."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import porter
from benchmarks.ascend_faults.fault import Fault, Found, Linted, Refused
from benchmarks.ascend_faults.workshop import CHIP, Workshop
from porter.errors import PorterError
from porter.kernels.ascend.catalogue.table import catalogue
from porter.kernels.ascend.catalogue.vendor_op import VendorRefusal
from porter.kernels.ascend.emulator.stand_in import emulated_npu
from porter.kernels.dispatch import usage

CONFIDENT = 0.5


@dataclass(frozen=True)
class Outcome:
    """`how`: "refused" or "linted" in `words`, "found" in `module` with `causes`, or "missed"; `met`: as the fault
    expects."""

    fault: Fault
    how: str
    words: str = ""
    module: str = ""
    causes: tuple[str, ...] = ()
    met: bool = False

    def line(self) -> str:
        """What is said of the fault, in one line."""
        if self.how == "found":
            return f"found in {self.module}: {', '.join(self.causes) or 'no cause'}"
        return f"{self.how}: {self.words[:300]}"


def judge(fault: Fault, workshop: Workshop) -> Outcome:
    """Load the faulty export under the emulator, ask the catalogue first, then align."""
    directory = workshop.faulty(fault)
    _, golden = workshop.port(fault.place)
    with emulated_npu(CHIP):
        words = refusal(directory, golden)
        if words:
            met = isinstance(fault.expected, Refused) and fault.expected.met(words)
            return Outcome(fault, "refused", words, met=met)
        return _aligned(fault, directory, golden)


def refusal(directory: Path, golden: porter.Golden) -> str:
    """The words in which the catalogue refuses calls of the golden's prompt and of a decoding step; "" where none.

    A refused call is served by the reference, and counted; a refusal by the tensors' values is raised.
    """
    ids = torch.tensor([golden.manifest["tokens"][0]])
    try:
        model = porter.load(directory, trust_remote_code=True)
        with torch.no_grad():
            model.generate(ids, max_new_tokens=2, do_sample=False)
    except (VendorRefusal, TypeError) as error:
        return _named(str(error))
    reasons = [reason for row in usage(model) for _, reason in _reasons(row["fallbacks"])]
    return _named("; ".join(dict.fromkeys(reasons)))


def _reasons(fallbacks: Any) -> list[tuple[str, str]]:
    return [(str(f["provider"]), str(f["reason"])) for f in fallbacks]


def _named(text: str) -> str:
    """The text where it names an operator of the catalogue; a refusal that does not helps nobody."""
    return text if any(name in text for name in catalogue()) else ""


def _aligned(fault: Fault, directory: Path, golden: porter.Golden) -> Outcome:
    try:
        report = porter.align(
            golden, directory, modules=fault.modules, passes=("weights", "replay"), trust_remote_code=True
        ).to_json()
    except PorterError as error:
        return Outcome(fault, "missed", words=str(error))
    if report["verdict"] != "drift":
        return Outcome(fault, "missed", words=report["verdict"])
    linted = [finding for finding in report["lint"] if finding["certain"]]
    if linted and not any(row["status"] == "drift" for row in report["modules"]):
        words = "{module}: {what} is {candidate}, not {golden}; {why}".format(**linted[0])
        met = isinstance(fault.expected, Linted) and any(f["kind"] == fault.expected.rule for f in linted)
        return Outcome(fault, "linted", words, met=met)
    module = report["first_drift"]["module"]
    causes = [c for c in report["causes"] if c["module"] == module and c["confidence"] >= CONFIDENT]
    kinds = [str(c["kind"]) for c in causes]
    met = isinstance(fault.expected, Found) and fault.expected.met(module, kinds)
    return Outcome(fault, "found", "; ".join(str(c["says"]) for c in causes[:1]), module, tuple(kinds), met)
