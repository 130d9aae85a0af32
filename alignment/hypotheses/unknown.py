"""What can be said when no known bug explains the drift: where in the output the error sits."""

from __future__ import annotations

from dataclasses import dataclass

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.locator import where
from porter.alignment.report import Cause


@dataclass(frozen=True)
class Unknown:
    """Always applies; localises the error instead of explaining it."""

    kinds: tuple[str, ...] = ("unknown",)

    def applies(self, drift: Drift) -> bool:
        """Always."""
        return True

    def explain(self, drift: Drift) -> Cause | None:
        """Where the error sits, and whether float64 shows it."""
        spread = "; ".join(where(drift)) or "it is spread over all tokens and channels"
        lane = (
            "float64 on the same weights agrees with the source, so look at the kernels and their precision"
            if drift.lane == "native"
            else "it is there in float64 too, so look at the mathematics or the weights, not at the precision"
        )
        says = f"No known bug explains this drift of {drift.before:.3g} in {drift.tensor}: {spread}; {lane}"
        return Cause("unknown", drift.module, 0.05, drift.before, None, says)


HYPOTHESIS = Unknown()
