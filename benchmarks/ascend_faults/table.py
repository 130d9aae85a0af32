"""All faults, and the page that says what became of each."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.ascend_faults import attention, experts, norms_and_activations, quantized
from benchmarks.ascend_faults.fault import Fault
from benchmarks.ascend_faults.judge import Outcome

FAULTS: tuple[Fault, ...] = (
    *norms_and_activations.FAULTS,
    *attention.FAULTS,
    *experts.FAULTS,
    *quantized.FAULTS,
)

HEAD = """# Faults planted in exports for Ascend

Each fault is a small edit of one exported file, in the export of a trained model that porter ships. The export is then
loaded with its own code under the emulator of ascend-910b. Either the catalogue refuses the call, in words that name
the operator and the argument, and the reference serves it, which is counted and shown (`--strict` makes it an error);
or `porter align` finds the module where the numbers drift, and names the cause; or, where the fault is too small for
the numbers to show, its lint says which argument contradicts the config. Nothing of this was run on a chip.

Written by `python -m benchmarks.ascend_faults`.
"""


def page(outcomes: Sequence[Outcome]) -> str:
    """The page in Markdown."""
    counted = {how: sum(outcome.how == how for outcome in outcomes) for how in ("refused", "found", "linted", "missed")}
    rows = [
        f"| {o.fault.id} | {o.fault.trap} | {o.fault.place.model} {o.fault.place.scheme} | {o.how} | {_cell(o)} |"
        for o in outcomes
    ]
    counts = ", ".join(f"{number} {how}" for how, number in counted.items())
    head = "| fault | trap | export | how | what is said |\n|-|-|-|-|-|\n"
    return f"{HEAD}\n{len(outcomes)} faults: {counts}.\n\n{head}" + "\n".join(rows) + "\n"


def _cell(outcome: Outcome) -> str:
    text = outcome.words if outcome.how != "found" else f"`{outcome.module}`: {', '.join(outcome.causes)}"
    return " ".join(text.replace("|", "/").split())[:240]
