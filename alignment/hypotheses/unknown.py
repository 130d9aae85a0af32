"""What can be said when no known bug explains the drift: where in the output the error sits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.trial import joined
from porter.alignment.report import Cause

MOST = 0.9
FEW = 0.25


@dataclass(frozen=True)
class Unknown:
    """Always applies; localises the error instead of explaining it."""

    kinds: tuple[str, ...] = ("unknown",)

    def applies(self, drift: Drift) -> bool:
        """Always."""
        return True

    def explain(self, drift: Drift) -> Cause | None:
        """Where the error sits, and whether float64 shows it."""
        where = ""
        if all(drift.tensor in seen for seen in (*drift.source_output[:1], *drift.candidate_output[:1])):
            candidate, source = joined(drift, drift.candidate_output), joined(drift, drift.source_output)
            where = "; ".join(localise(candidate, source))
        spread = where or "it is spread over all tokens and channels"
        lane = (
            "float64 on the same weights agrees with the source, so look at the kernels and their precision"
            if drift.lane == "native"
            else "it is there in float64 too, so look at the mathematics or the weights, not at the precision"
        )
        says = f"No known bug explains this drift of {drift.before:.3g} in {drift.tensor}: {spread}; {lane}"
        return Cause("unknown", drift.module, 0.05, drift.before, None, says)


def localise(candidate: torch.Tensor, oracle: torch.Tensor) -> Iterator[str]:
    """What is peculiar about where |candidate - oracle|^2 lies in [..., tokens, features]."""
    if candidate.shape != oracle.shape or candidate.dim() < 2:
        return
    square = (candidate - oracle).nan_to_num(posinf=0.0, neginf=0.0).flatten(0, -2).square()
    total = float(square.sum())
    if total == 0.0:
        return
    tokens, channels = square.sum(1) / total, square.sum(0) / total
    yield from _range("tokens", tokens)
    yield from _range("channels", channels)


def _range(what: str, shares: torch.Tensor) -> Iterator[str]:
    """Names the few places that hold most of the error."""
    order = shares.argsort(descending=True)
    needed = int((shares[order].cumsum(0) < MOST).sum()) + 1
    if len(shares) < 4 or needed > FEW * len(shares):
        return
    places = sorted(order[:needed].tolist())
    spans = places[-1] - places[0] + 1 == needed and needed > 1
    listed = (
        f"{places[0]} to {places[-1]}" if spans else ", ".join(map(str, places[:6])) + (", ..." if needed > 6 else "")
    )
    yield f"{100 * MOST:.0f} % of it lies in {needed} of {len(shares)} {what} ({listed})"


HYPOTHESIS = Unknown()
