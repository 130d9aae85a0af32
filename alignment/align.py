"""`porter.align`: golden against candidate, weights, replay and free run, and the causes of what drifts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from porter.alignment.calls import Recorded
from porter.alignment.candidate import Candidate, compute_dtype, load_candidate
from porter.alignment.correspondence_file import check_names
from porter.alignment.diagnosis import causes_of_weights, drift_of
from porter.alignment.forced_children import unforced_children
from porter.alignment.free_pass import FreePass
from porter.alignment.module_result import ModuleResult
from porter.alignment.pairing import Pair, Pairing, module_names, pair_modules, selected, selection
from porter.alignment.preliminary_checks import checks_of_model, checks_of_recording
from porter.alignment.replaced_layers import replaced_layers
from porter.alignment.replay import Replayer, replay_all
from porter.alignment.report import Cause, ModuleRow, Report, Routing, Skipped, Tokens, WeightRow
from porter.alignment.rows import drifts_of, rows_of
from porter.alignment.siblings import Siblings
from porter.alignment.source import open_source, rebuild_source
from porter.alignment.streaming import available_bytes, kept, reach, release
from porter.alignment.verdict import Drifted, coverage, drifted_weights, first_of, skipped_weights, verdict_of
from porter.alignment.weights import JudgedWeight, WeightPairing, adopt, judge
from porter.errors import PorterError
from porter.golden.source import device_of
from porter.golden.store import Golden

PASSES = ("weights", "replay", "free")
CAUSES_FOR = 3
"""How many drifting modules are diagnosed, first in execution order: what follows is seldom another fault."""

SHARE = 8
"""A streamed model that takes at most this part of the free memory stays in memory during the free run."""

Progress = Callable[[int], None]


@dataclass
class Findings:
    """What the passes gather."""

    weights: list[JudgedWeight] = field(default_factory=list)
    rows: list[ModuleRow] = field(default_factory=list)
    drifts: list[Drifted] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    compared: set[str] = field(default_factory=set)
    skipped: list[Skipped] = field(default_factory=list)
    decisions: int = 0
    flips: int = 0
    benign: int = 0
    tokens: Tokens | None = None
    unjudged: bool = False

    @property
    def routing(self) -> Routing | None:
        """Counts over every router, None where there was none."""
        return Routing(self.decisions, self.flips, self.benign) if self.decisions else None


def align(
    golden: Golden | str | Path,
    candidate: Any,
    *,
    passes: str | Sequence[str] = PASSES,
    modules: str | None = None,
    factor: float = 2.0,
    correspondence: Any = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    source: nn.Module | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compare `candidate` with `golden` module by module and say where it drifts first and why.

    `candidate`: see `load_candidate`. `passes`: "all" or some of weights, replay, free. `modules`: a regular expression
    that restricts the comparison (what it leaves out is listed and counts as not compared). `factor`: how many times
    its own rounding noise a module may err. `source`: the source model, where the golden's own reference cannot be
    rebuilt; it is changed (its weights become the candidate's where these are in order).

    Raises PorterError for input that cannot be compared at all.
    """
    golden = golden if isinstance(golden, Golden) else Golden.open(golden)
    place = device_of(str(device))
    if place.type == "meta":
        raise PorterError("--device meta: holds no values, so nothing can be compared there")
    wanted = _passes(passes)
    pattern = selection(modules)
    advance = progress or (lambda amount: None)
    loaded = load_candidate(
        candidate, correspondence=correspondence, device=device, dtype=dtype, trust_remote_code=trust_remote_code
    )
    if loaded.golden is not None:
        from porter.alignment.recorded_alignment import align_recorded

        checks = checks_of_recording(golden, loaded.golden)
        return checks.applied(
            align_recorded(golden, loaded, source or rebuild_source(golden), pattern, factor, advance)
        )
    assert loaded.model is not None, "a candidate is a golden or a model"
    names = module_names(loaded.model)
    if correspondence is not None:
        check_names(correspondence, loaded.correspondence, names, {record.module for record in golden.records})
    pairing = pair_modules(golden, names, loaded.correspondence)
    pairs = selected(pairing, pattern)
    findings = Findings()
    source = _source(golden, source, findings, place)
    recorded = Recorded(golden, compute_dtype(loaded.model), place)
    checks = checks_of_model(golden, recorded, source, loaded, pairing, wanted)
    if source is not None:
        asked = "weights" in wanted
        _compare_weights(findings, loaded.model, source, pairing, pattern, recorded.recorded_dtype, asked)
    elif "weights" in wanted and wanted == ("weights",):
        raise PorterError(findings.skipped[0].why)
    replayer = Replayer(recorded, pairing, loaded.model, source, factor)
    left_out = {pair.module for pair in pairing.pairs} - {pair.module for pair in pairs}
    findings.skipped += [Skipped(name, "not selected by --modules") for name in sorted(left_out)]
    free = FreePass(replayer, {pair.module: pair for pair in pairs})
    if "replay" in wanted:
        _replay(findings, replayer, pairs, free, advance)
    if "free" in wanted:
        _free(findings, free, replayer, "replay" in wanted)
    if "weights" in wanted and source is not None:
        explained = {cause.module for cause in findings.causes if cause.after is not None}
        findings.causes += causes_of_weights(findings.weights, pairing, source, explained, CAUSES_FOR)
    return checks.applied(_report(golden, loaded, pairing, findings, wanted))


def _passes(passes: str | Sequence[str]) -> tuple[str, ...]:
    asked = (passes,) if isinstance(passes, str) else tuple(passes)
    if "all" in asked:
        return PASSES
    unknown = [name for name in asked if name not in PASSES]
    if unknown or not asked:
        raise PorterError(f"passes: {unknown or asked} unknown; choose from {', '.join(PASSES)}, all")
    return tuple(name for name in PASSES if name in asked)


def _source(golden: Golden, given: nn.Module | None, findings: Findings, device: torch.device) -> nn.Module | None:
    if given is not None:
        return given.to(device).eval()
    try:
        return open_source(golden, device)
    except PorterError as error:
        findings.skipped.append(Skipped("", f"no float64 oracle: {error}"))
        return None


def _compare_weights(
    findings: Findings,
    candidate: nn.Module,
    source: nn.Module,
    pairing: Pairing,
    pattern: re.Pattern[str] | None,
    recorded: torch.dtype,
    asked: bool,
) -> None:
    """Judge every weight and make the source the candidate's oracle; drifts count where the pass was asked for."""
    for weight in WeightPairing(candidate, source, pairing.correspondence, compute_dtype(candidate), recorded):
        judged = judge(weight)
        adopt(source, judged)
        if pattern is None or pattern.search(weight.owner):
            findings.weights.append(judged.settled())
    release(candidate, source)
    if asked:
        findings.drifts += replaced_layers(findings.weights, pairing)
        findings.drifts += drifted_weights(findings.weights, pairing)
        findings.skipped += skipped_weights([judged.row for judged in findings.weights])


def _replay(findings: Findings, replayer: Replayer, pairs: Sequence[Pair], free: FreePass, advance: Progress) -> None:
    diagnosed = 0
    siblings = Siblings()
    for result in chain(
        replay_all(replayer, _reached(replayer, pairs), advance), _outlying(findings, replayer, siblings)
    ):
        siblings.add(result)
        _take(findings, replayer, result)
        free.remember(result)
        if result.drifted and diagnosed < CAUSES_FOR and findings.rows[-1].status != "inherited":
            diagnosed += 1
            findings.causes += _causes(replayer, result, findings.weights)
    release(replayer.candidate, replayer.source)


def _outlying(findings: Findings, replayer: Replayer, siblings: Siblings) -> Iterator[ModuleResult]:
    """The modules that stand out among their siblings, once all have been replayed: again, and taken anew."""
    pairs = replayer.pairing.by_module
    for result in siblings.tightened(lambda pair: replayer.replay(next(_reached(replayer, [pair]))), pairs):
        findings.rows = [row for row in findings.rows if row.module != result.pair.module]
        result.flips = []
        yield result


def _reached(replayer: Replayer, pairs: Sequence[Pair]) -> Iterator[Pair]:
    """The pairs one by one, of models that are streamed with the part around each in memory."""
    for pair in pairs:
        reach(replayer.candidate, pair.module)
        reach(replayer.source, pair.sources[0])
        yield pair


@contextmanager
def _kept(replayer: Replayer) -> Iterator[None]:
    """Keep streamed models in memory while the context lasts, where each call would read them anew and they fit."""
    steps = len(replayer.recorded.records.get("", []))
    share = available_bytes(replayer.recorded.device) // SHARE if steps > 1 else 0
    with ExitStack() as stack:
        for model in (replayer.candidate, replayer.source):
            if model is not None:
                stack.enter_context(kept(model, share))
        yield


def _free(findings: Findings, free: FreePass, replayer: Replayer, replayed: bool) -> None:
    with _kept(replayer):
        ran = free.run()
    if ran:
        findings.rows, faults = free.joined(findings.rows, findings.drifts)
        findings.drifts += faults
        findings.causes += free.causes
        findings.tokens = free.tokens
        if not replayed or free.replays_nothing:
            findings.compared |= free.compared
    findings.skipped += free.skipped
    findings.unjudged |= free.unjudged


def _take(findings: Findings, replayer: Replayer, result: ModuleResult) -> None:
    findings.unjudged |= result.failed
    rows = list(rows_of(result, replayer.candidate.get_submodule(result.pair.module)))
    if result.drifted and _brought_by_a_child(findings, replayer, result):
        rows = [replace(row, status="inherited") if row.status == "drift" else row for row in rows]
    else:
        findings.drifts += drifts_of(result)
    findings.rows += rows
    if result.compared:
        findings.compared.add(result.pair.module)
    else:
        findings.skipped.append(Skipped(result.pair.module, result.why or "no tensor in common with the golden"))
    for flips in result.flips:
        if flips is not None:
            findings.decisions += flips.flipped.numel()
            findings.flips += int(flips.flipped.sum())
            findings.benign += int(flips.benign.sum())


def _brought_by_a_child(findings: Findings, replayer: Replayer, result: ModuleResult) -> bool:
    """Whether a child that ran within this module's replay is itself over its budget."""
    drifted = {drifted.drift.module for drifted in findings.drifts}
    return bool(drifted & unforced_children(replayer.pairing, result))


def _causes(replayer: Replayer, result: ModuleResult, weights: Sequence[JudgedWeight]) -> list[Cause]:
    from porter.alignment.hypotheses.catalogue import explain

    drift = drift_of(replayer, result, weights)
    return [] if drift is None else explain(drift)


def _report(
    golden: Golden, candidate: Candidate, pairing: Pairing, findings: Findings, passes: tuple[str, ...]
) -> Report:
    weights: list[WeightRow] = [judged.row for judged in findings.weights] if "weights" in passes else []
    asked = findings.weights if "weights" in passes else None
    compared = findings.compared if set(passes) & {"replay", "free"} else {pair.module for pair in pairing.pairs}
    covered = coverage(candidate.model, pairing, compared, asked, findings.skipped)
    order: dict[str, Pair] = pairing.by_module
    return Report(
        verdict=verdict_of(findings.drifts, covered, findings.unjudged),
        first_drift=first_of(findings.drifts),
        causes=sorted(findings.causes, key=lambda cause: -cause.confidence),
        tokens=findings.tokens,
        routing=findings.routing,
        coverage=covered,
        weights=weights,
        modules=sorted(findings.rows, key=lambda row: (row.step, order[row.module].position)),
        unmatched={"golden": list(pairing.unmatched_golden), "candidate": list(pairing.unmatched_candidate)},
        environment={
            "golden": {"dtype": golden.manifest["dtype"], **golden.manifest.get("environment", {})},
            "candidate": dict(candidate.environment),
        },
    )
