"""The weights pass: every weight judged, and the source made the oracle of this candidate."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import nn

from porter.alignment.candidate import Candidate, compute_dtype
from porter.alignment.counterparts import Counterparts, lacking
from porter.alignment.findings import Findings
from porter.alignment.journal import Journal, journaled
from porter.alignment.pairing import Pairing
from porter.alignment.rank_shards import RankShards
from porter.alignment.replaced_layers import replaced_layers
from porter.alignment.report import Skipped
from porter.alignment.shard_faults import ShardFaults
from porter.alignment.streaming import release
from porter.alignment.verdict import drifted_weights, skipped_weights
from porter.alignment.weight_judgement import adopt
from porter.alignment.weights import WeightPairing


def compare_weights(
    findings: Findings,
    candidate: Candidate,
    source: nn.Module,
    pairing: Pairing,
    pattern: re.Pattern[str] | None,
    recorded: torch.dtype,
    asked: bool,
    journal: Journal | None,
) -> None:
    """Judge every weight and make the source the candidate's oracle; drifts count where the pass was asked for.

    What of the source no weight stands for is not compared, whichever passes were asked for.
    """
    model, shards = candidate.model, candidate.shards
    assert model is not None, "recordings have no weights"
    counterparts = Counterparts.of(source)
    faults = None if shards is None else ShardFaults(shards, source, pairing)
    met: set[str] = set()
    weights = WeightPairing(model, source, pairing.correspondence, compute_dtype(model), recorded)
    for each in journaled(weights, journal):
        judged = each if faults is None else faults.judged(each)
        met.update(pairing.correspondence.source_of(judged.weight.name))
        adopt(source, judged)
        if pattern is None or pattern.search(judged.weight.owner):
            findings.weights.append(judged.settled())
    release(model, source)
    missing = counterparts.missing(met)
    findings.met = counterparts.share(missing)
    findings.skipped += lacking(pairing, missing)
    if asked:
        findings.drifts += replaced_layers(findings.weights, pairing)
        findings.drifts += drifted_weights(findings.weights, pairing)
        findings.skipped += skipped_weights([judged.row for judged in findings.weights])
    if asked and faults is not None and shards is not None:
        findings.causes += faults.causes(findings.weights)
        findings.explained |= faults.explained
        findings.skipped += _unknown(shards)


def _unknown(shards: RankShards) -> Iterator[Skipped]:
    for name in shards.unknown:
        yield Skipped(name.rpartition(".")[0], f"the source has nothing for {name} of the ranks")
