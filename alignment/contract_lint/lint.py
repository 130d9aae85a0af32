"""The lint as a whole: of a module beside its source, or of directories by their headers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from porter.alignment.contract_lint.code import narrower_code
from porter.alignment.contract_lint.contract import (
    Contract,
    contract_of_directory,
    contract_of_golden,
    contract_of_module,
)
from porter.alignment.contract_lint.declared import declared_differences, position_range
from porter.alignment.contract_lint.kinds import CAUSES, precision
from porter.alignment.contract_lint.stored import narrower_tensors
from porter.alignment.pairing import Pairing
from porter.alignment.report import Cause, FirstDrift, LintFinding, ModuleRow
from porter.alignment.verdict import Drifted
from porter.correspondence import Correspondence
from porter.golden.store import Golden

ROUNDINGS = 16.0
"""Times the unit roundoff of the narrower dtype: the most that computing in it may explain of a measured error."""

CONFIRMED, CONTESTED = 0.9, 0.5


def lint(golden: Golden, source: nn.Module | None, candidate: nn.Module, pairing: Pairing) -> list[LintFinding]:
    """Every contract that `candidate` keeps less well than the golden, the certain ones first; nothing is run.

    `source` is the golden's model with its own weights; without one, the golden's headers are all there is, and code
    is not compared.
    """
    mine = contract_of_module(candidate)
    theirs = contract_of_golden(golden) if source is None else _recorded(contract_of_module(source), golden)
    found = _compared(theirs, mine, pairing.correspondence, longest(golden))
    if source is not None:
        found += narrower_code(theirs, mine, pairing)
    return sorted(found, key=lambda finding: not finding.certain)


def lint_directory(golden: Golden, directory: Path, correspondence: Correspondence | None = None) -> list[LintFinding]:
    """The same of a checkpoint or exported directory, from config and headers alone: no weight is read, no code is run.

    Raises PorterError where the directory cannot be read.
    """
    mine, theirs = contract_of_directory(directory), contract_of_golden(golden)
    found = _compared(theirs, mine, correspondence or Correspondence(), longest(golden))
    return sorted(found, key=lambda finding: not finding.certain)


def _recorded(source: Contract, golden: Golden) -> Contract:
    """The rebuilt source with the dtype that the golden was recorded in."""
    dtype = contract_of_golden(golden).compute
    return Contract(dtype, source.tensors, source.config, source.pinned, source.values, source.module)


def _compared(theirs: Contract, mine: Contract, correspondence: Correspondence, positions: int) -> list[LintFinding]:
    return [
        *narrower_tensors(theirs, mine, correspondence),
        *position_range(theirs, mine, positions),
        *declared_differences(theirs, mine),
    ]


def longest(golden: Golden) -> int:
    """The most positions that any recorded prompt and its decode steps reach."""
    return max(
        (int(batch.tokens.shape[1]) + batch.steps - 1 for batch in golden.batches if batch.tokens is not None),
        default=0,
    )


def certain_drifts(findings: Sequence[LintFinding], pairing: Pairing) -> list[Drifted]:
    """The certain findings as drifts of their modules at the first step."""
    drifts = []
    for finding in findings:
        if finding.certain:
            pair = pairing.by_module.get(finding.module)
            position = (0, pair.position if pair else 0)
            source = pair.source if pair else finding.module
            drifts.append(Drifted(position, FirstDrift(finding.module, source, 0, finding.what)))
    return drifts


def confirmed_causes(
    findings: Sequence[LintFinding], rows: Sequence[ModuleRow], causes: Sequence[Cause], narrowest: torch.dtype
) -> list[Cause]:
    """Causes for findings whose module the replay found over its budget, by no more than rounding explains.

    `narrowest`: the dtype that the candidate computes in. Where another cause is known for the module with confidence,
    the finding comes after it. Errors before are the replay's; none is measured after, since nothing was undone.
    """
    found = []
    known = {(cause.kind, cause.module) for cause in causes}
    for finding in findings:
        kind = CAUSES.get(finding.kind)
        row = next((r for r in rows if r.module == finding.module and r.status == "drift"), None)
        if kind is None or row is None or row.introduced is None or (kind, finding.module) in known:
            continue
        if row.introduced > ROUNDINGS * max(precision(narrowest), precision(torch.bfloat16)) / 2:
            continue
        sure = any(c.module == finding.module and c.confidence >= CONFIRMED and c.kind != kind for c in causes)
        known.add((kind, finding.module))
        found.append(
            Cause(kind, finding.module, CONTESTED if sure else CONFIRMED, row.introduced, None, _says(finding))
        )
    return found


def _says(finding: LintFinding) -> str:
    return f"{finding.what}: {finding.candidate} where the golden has {finding.golden}; {finding.why}"
