"""What is checked before any comparison, and what it does to the report that follows: sanity and the contract lint."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from porter.alignment.calls import Recorded
from porter.alignment.candidate import Candidate
from porter.alignment.capture_sanity import invalid, sanity_of_model, sanity_of_recording
from porter.alignment.contract_lint.lint import certain_drifts, confirmed_causes, lint
from porter.alignment.pairing import Pairing
from porter.alignment.report import LintFinding, Report, SanityCheck
from porter.alignment.streaming import stream_of
from porter.alignment.token_identity import tokenizer_check
from porter.alignment.verdict import Drifted
from porter.errors import PorterError
from porter.golden.store import Golden


@dataclass(frozen=True)
class PreliminaryChecks:
    """The findings, and the certain ones as drifts; `compute` is the dtype that the candidate computes in."""

    sanity: list[SanityCheck]
    lint: list[LintFinding] = field(default_factory=list)
    drifts: list[Drifted] = field(default_factory=list)
    compute: torch.dtype = torch.float32

    def applied(self, report: Report) -> Report:
        """The report with the findings in it, changed in place.

        A certain finding makes the verdict `drift`; a check that voids the comparison makes what would be `aligned`
        `incomparable`, since a drift that the replay found stands on its own inputs. Findings whose module the replay
        found drifting become causes.
        """
        report.sanity, report.lint = self.sanity, self.lint
        report.causes += confirmed_causes(self.lint, report.modules, report.causes, self.compute)
        report.causes.sort(key=lambda cause: -cause.confidence)
        if self.drifts and report.verdict != "drift":
            report.verdict = "drift"
            report.first_drift = min(self.drifts, key=lambda drifted: drifted.position).drift
        if report.verdict == "aligned" and invalid(self.sanity):
            report.verdict = "incomparable"
        return report


def checks_of_model(
    golden: Golden,
    recorded: Recorded,
    source: nn.Module | None,
    candidate: Candidate,
    pairing: Pairing,
    passes: Collection[str],
) -> PreliminaryChecks:
    """The checks of a candidate that can be run; before the source takes over any of the candidate's weights."""
    assert candidate.model is not None, "recordings have checks of their own"
    sanity = sanity_of_model(golden, recorded, candidate.model, "free" in passes)
    if candidate.kind in ("port", "checkpoint"):
        sanity += tokenizer_check(golden, Path(candidate.name))
    findings = [*vendor_findings(golden, candidate), *lint(golden, source, candidate.model, pairing)]
    return PreliminaryChecks(sanity, findings, certain_drifts(findings, pairing), recorded.dtype)


def vendor_findings(golden: Golden, candidate: Candidate) -> list[LintFinding]:
    """What the lint of vendor calls says of a port that runs under the emulator of its chip, on the golden's prompt.

    Calls that were refused are left out: the report tells of every fallback.
    """
    tokens = next((batch.tokens for batch in golden.batches if batch.tokens is not None), None)
    if candidate.kind != "port" or candidate.model is None or tokens is None or stream_of(candidate.model) is not None:
        return []
    from porter.ascend_lint.lint import lint_loaded

    return [
        LintFinding(f.rule, f.module, f.what, f.expected, f.found, f.level == "fault", f.remedy)
        for f in lint_loaded(candidate.model, Path(candidate.name), tokens[:1])
        if f.rule != "refused"
    ]


def checks_of_recording(golden: Golden, candidate: Golden) -> PreliminaryChecks:
    """The checks of a candidate that is a recording itself."""
    return PreliminaryChecks(sanity_of_recording(golden, candidate))


def refuse_other_type(golden: Golden, candidate: Candidate) -> None:
    """PorterError where a port is of another type of model than the golden: all of it would drift, and tell nothing."""
    recorded = (golden.manifest.get("model", {}).get("config") or {}).get("model_type")
    ported = getattr(getattr(candidate.model, "config", None), "model_type", None)
    if candidate.kind == "port" and recorded and ported and recorded != ported:
        raise PorterError(
            f"{candidate.name}: is a port of a {ported} model, and {golden.path} was recorded of a {recorded} one; "
            "give a golden of the port's own original"
        )
