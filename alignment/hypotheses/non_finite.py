"""Where NaN begins, and what overflowed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from porter.alignment.drift import Drift
from porter.alignment.report import Cause

LARGEST = {"float16": 65504.0, "float8 e4m3": 448.0, "float8 e5m2": 57344.0}


def _places(bad: torch.Tensor) -> str:
    """Which tokens of [..., features] have anything bad."""
    tokens = bad.flatten(0, -2).any(-1) if bad.dim() > 1 else bad
    found = tokens.nonzero().flatten().tolist()
    listed = ", ".join(map(str, found[:4])) + (", ..." if len(found) > 4 else "")
    return f"{int(bad.sum())} of {bad.numel()} values, in {len(found)} of {tokens.numel()} tokens ({listed})"


@dataclass(frozen=True)
class NanOrigin:
    """The module puts out NaN though its golden inputs are finite."""

    kinds: tuple[str, ...] = ("nan-origin",)

    def applies(self, drift: Drift) -> bool:
        """Whether the candidate has NaN where the source has none."""
        return bool(drift.candidate.isnan().any()) and bool(drift.oracle.isfinite().all())

    def explain(self, drift: Drift) -> Cause | None:
        """Where the NaN are; a likely origin where whole tokens are NaN."""
        bad = drift.candidate.isnan()
        rows = bad.flatten(0, -2) if bad.dim() > 1 else bad[:, None]
        whole = bool((rows.all(-1) == rows.any(-1)).all()) and not bool(rows.all())
        hint = (
            "; whole tokens at a time, as a fully masked softmax row or an uninitialised buffer gives" if whole else ""
        )
        says = f"NaN begins here, from finite golden inputs: {_places(bad)}{hint}"
        return Cause("nan-origin", drift.module, 0.99, float("inf"), None, says)


@dataclass(frozen=True)
class Overflow:
    """Infinite or clipped values where the source needs more range than a format has."""

    kinds: tuple[str, ...] = ("overflow",)

    def applies(self, drift: Drift) -> bool:
        """Whether the candidate has infinities of its own, or the source exceeds a format's range."""
        return bool(drift.candidate.isinf().any()) or float(drift.oracle.abs().max()) > min(LARGEST.values())

    def explain(self, drift: Drift) -> Cause | None:
        """Infinity by name; or the format whose range, when the oracle is clipped to it, gives the candidate."""
        infinite = drift.candidate.isinf()
        if bool(infinite.any()):
            largest = float(drift.oracle[infinite].abs().min()) if bool(drift.oracle.isfinite().all()) else float("inf")
            says = f"Infinity begins here: {_places(infinite)}, where the source's values start at {largest:.4g}"
            return Cause("overflow", drift.module, 0.99, float("inf"), None, f"{says}: use a format with more range")
        for name, largest in LARGEST.items():
            after = drift.distance(drift.oracle.clamp(-largest, largest))
            if after <= drift.floor:
                says = f"Values are clipped at {largest:g}, the range of {name}: use bfloat16 or float32 here"
                return Cause("overflow", drift.module, 0.98, drift.before, after, says)
        return None


NAN = NanOrigin()
OVERFLOW = Overflow()
