"""`porter.align`: golden against candidate, weights, replay and free run, and the causes of what drifts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from porter.alignment.calls import Recorded
from porter.alignment.candidate import Candidate, compute_dtype, load_candidate
from porter.alignment.correspondence_file import check_names
from porter.alignment.counterparts import recorded_share_met
from porter.alignment.diagnosis import causes_of_weights
from porter.alignment.findings import Findings
from porter.alignment.free_pass import FreePass
from porter.alignment.journal import FOLDER, Journal, Resumption, journaling
from porter.alignment.journal_key import key_of
from porter.alignment.memory import available_bytes
from porter.alignment.pairing import Pair, Pairing, module_names, pair_modules, selected, selection
from porter.alignment.preliminary_checks import checks_of_model, checks_of_recording, refuse_other_type
from porter.alignment.rank_candidate import Layout
from porter.alignment.replay import Replayer
from porter.alignment.replay_pass import CAUSES_FOR, ReplayPass
from porter.alignment.report import Report, Skipped, WeightRow
from porter.alignment.source import open_source, trusted_source
from porter.alignment.streaming import kept
from porter.alignment.verdict import coverage, first_of, verdict_of
from porter.alignment.weights_pass import compare_weights
from porter.errors import PorterError
from porter.golden.source import device_of
from porter.golden.store import Golden
from porter.kernels.cpu.build import cache_directory

PASSES = ("weights", "replay", "free")
SHARE = 8
"""A streamed model that takes at most this part of the free memory stays in memory during the free run."""

Progress = Callable[[int], None]


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
    resumption: Resumption | None = None,
    also: Sequence[Golden | str | Path] = (),
    layout: Layout = None,
    probes: int = 1,
) -> Report:
    """Compare `candidate` with `golden` module by module and say where it drifts first and why.

    `candidate`: see `load_candidate`. `passes`: "all" or some of weights, replay, free. `modules`: a regular expression
    that restricts the comparison (what it leaves out is listed and counts as not compared). `factor`: how many times
    its own rounding noise a module may err. `source`: the source model, where the golden's own reference cannot be
    rebuilt; it is changed (its weights become the candidate's where these are in order). `resumption`: what was found
    is written down in porter's cache, and a comparison of the same directory that was interrupted continues from it.
    `layout`: how the shards of a candidate on parallel ranks make up its weights, where names and shapes do not tell.
    `probes`: how many tensors are judged in all, where this is one alignment of many (`budget.allowance`); no fewer
    than the golden has records.
    `also`: further goldens of the same tokens, which vote with `golden` on which of them is wrong (`quorum.py`).

    Raises PorterError for input that cannot be compared at all.
    """
    if also:
        from porter.alignment.quorum import align_by_quorum

        options: dict[str, Any] = {
            "passes": passes, "modules": modules, "factor": factor, "correspondence": correspondence, "device": device,
            "dtype": dtype, "trust_remote_code": trust_remote_code, "source": source, "progress": progress,
            "resumption": resumption, "layout": layout,
        }  # fmt: skip
        return align_by_quorum([golden, *also], lambda chosen: align(chosen, candidate, **options), factor, source)
    golden = golden if isinstance(golden, Golden) else Golden.open(golden)
    if source is None and trust_remote_code:
        source = trusted_source(golden)
    place = device_of(str(device))
    if place.type == "meta":
        raise PorterError("--device meta: holds no values, so nothing can be compared there")
    wanted = _passes(passes)
    pattern = selection(modules)
    advance = progress or (lambda amount: None)
    loaded = load_candidate(
        candidate, correspondence=correspondence, device=device, dtype=dtype, trust_remote_code=trust_remote_code,
        layout=layout,
    )  # fmt: skip
    if loaded.golden is not None:
        from porter.alignment.recorded_alignment import align_recorded

        checks = checks_of_recording(golden, loaded.golden)
        oracle = open_source(golden, place) if source is None else source.to(place)
        return checks.applied(align_recorded(golden, loaded, oracle, pattern, factor, advance, place))
    assert loaded.model is not None, "a candidate is a golden or a model"
    refuse_other_type(golden, loaded)
    names = module_names(loaded.model)
    # The names of fused shards are gone once these are put together.
    if correspondence is not None and loaded.shards is None:
        check_names(correspondence, loaded.correspondence, names, {record.module for record in golden.records})
    pairing = pair_modules(golden, names, loaded.correspondence)
    pairs = selected(pairing, pattern)
    findings = Findings()
    given = source is not None
    source = _source(golden, source, findings, place)
    recorded = Recorded(golden, compute_dtype(loaded.model), place)
    checks = checks_of_model(golden, recorded, source, loaded, pairing, wanted)
    if source is None and wanted == ("weights",):
        raise PorterError(findings.skipped[0].why)
    settings = {"passes": wanted, "modules": modules, "factor": factor, "device": str(device), "dtype": str(dtype)}
    settings["layout"] = None if loaded.shards is None else repr(loaded.shards.rules)
    with _journal(golden, candidate, loaded, settings, None if given else resumption) as journal:
        if source is not None:
            compare_weights(
                findings, loaded, source, pairing, pattern, recorded.recorded_dtype, "weights" in wanted, journal
            )
        judged = max(probes, len(golden.records))
        replayer = Replayer(recorded, pairing, loaded.model, source, factor, probes=judged)
        left_out = {pair.module for pair in pairing.pairs} - {pair.module for pair in pairs}
        findings.skipped += [Skipped(name, "not selected by --modules") for name in sorted(left_out)]
        free = FreePass(replayer, {pair.module: pair for pair in pairs})
        if "replay" in wanted:
            ReplayPass(findings, replayer, free).run(pairs, advance, journal)
        if "free" in wanted:
            _free(findings, free, replayer, "replay" in wanted)
        if "weights" in wanted and source is not None:
            explained = findings.explained | {cause.module for cause in findings.causes if cause.after is not None}
            findings.causes += causes_of_weights(findings.weights, pairing, source, explained, CAUSES_FOR)
        return checks.applied(_report(golden, loaded, pairing, findings, wanted))


@contextmanager
def _journal(
    golden: Golden, candidate: Any, loaded: Candidate, settings: dict[str, Any], resumption: Resumption | None
) -> Iterator[Journal | None]:
    """The journal of comparing a directory; None for a model in memory, whose content no key could tell."""
    if resumption is None or not isinstance(candidate, str | Path) or not Path(candidate).is_dir():
        yield None
        return
    settings = {**settings, "as": loaded.environment, "correspondence": loaded.correspondence.to_json()}
    key = key_of(golden, Path(candidate), settings)
    with journaling(cache_directory() / FOLDER, key, resumption) as journal:
        yield journal


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


def _report(
    golden: Golden, candidate: Candidate, pairing: Pairing, findings: Findings, passes: tuple[str, ...]
) -> Report:
    weights: list[WeightRow] = [judged.row for judged in findings.weights] if "weights" in passes else []
    asked = findings.weights if "weights" in passes else None
    compared = findings.compared if set(passes) & {"replay", "free"} else {pair.module for pair in pairing.pairs}
    met = recorded_share_met(pairing) if findings.met is None else findings.met
    covered = coverage(candidate.model, pairing, compared, asked, findings.skipped, met)
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
