"""Group-limited routing that ranks, keeps or masks its groups differently."""

from __future__ import annotations

from collections.abc import Iterator

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.routing import Gate, altered, gates, with_gate
from porter.alignment.hypotheses.trial import Trial, TrialHypothesis


def _variants(gate: Gate) -> Iterator[tuple[str, Gate]]:
    if gate.group_score == "top2":
        says = "Groups of experts are ranked by their best score where the source sums their two best: sum the top 2"
        yield says, altered(gate, group_score="max")
    else:
        says = "Groups of experts are ranked by the sum of their two best scores where the source takes the best one"
        yield says, altered(gate, group_score="top2")
    yield (
        f"All {gate.groups} groups compete where the source keeps the best {gate.groups_kept}: mask the others",
        altered(gate, groups=1),
    )
    if gate.excluded != 0.0:
        says = "Groups that were not kept are masked with 0 where the source uses -inf: a negative score loses to them"
        yield says, altered(gate, excluded=0.0)
    for kept in (gate.groups_kept - 1, gate.groups_kept + 1):
        if 0 < kept < gate.groups:
            says = f"{kept} groups of experts are kept where the source keeps topk_group = {gate.groups_kept}"
            yield says, altered(gate, groups_kept=kept)


def _trials(drift: Drift) -> Iterator[Trial]:
    for path, _, gate in gates(drift):
        if gate.groups > 1 and gate.groups_kept < gate.groups:
            for says, variant in _variants(gate):
                yield Trial("router-groups", says, with_gate(path, variant), part=path)
        for top_k in (gate.top_k - 1, gate.top_k + 1):
            if top_k > 0:
                says = f"{top_k} experts are chosen per token where the source chooses {gate.top_k}: set top_k"
                yield Trial("router-groups", says, with_gate(path, altered(gate, top_k=top_k)), part=path)


HYPOTHESIS = TrialHypothesis(("router-groups",), _trials)
