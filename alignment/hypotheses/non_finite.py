"""Where NaN begins, and what overflowed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.trial import Outcome, Trial, cause, joined, mapped
from porter.alignment.report import Cause

LARGEST = {"float16": 65504.0, "float8 e4m3": 448.0, "float8 e5m2": 57344.0}


def _both(drift: Drift) -> tuple[torch.Tensor, torch.Tensor]:
    """The drifting tensor [tokens, features] of the source and of the candidate; empty where one has none."""
    if not all(drift.tensor in seen for seen in (*drift.source_output[:1], *drift.candidate_output[:1])):
        return torch.empty(0, 1), torch.empty(0, 1)
    return joined(drift, drift.source_output), joined(drift, drift.candidate_output)


def _places(bad: torch.Tensor) -> str:
    """Which tokens of [tokens, features] have anything bad."""
    tokens = bad.any(-1)
    found = tokens.nonzero().flatten().tolist()
    listed = ", ".join(map(str, found[:4])) + (", ..." if len(found) > 4 else "")
    return f"{int(bad.sum())} of {bad.numel()} values, in {len(found)} of {tokens.numel()} tokens ({listed})"


@dataclass(frozen=True)
class NanOrigin:
    """The module puts out NaN though its golden inputs are finite."""

    kinds: tuple[str, ...] = ("nan-origin",)

    def applies(self, drift: Drift) -> bool:
        """Whether the candidate has NaN where the source has none."""
        source, candidate = _both(drift)
        return bool(candidate.isnan().any()) and bool(source.isfinite().all())

    def explain(self, drift: Drift) -> Cause | None:
        """Where the NaN are; a likely origin where whole tokens are NaN."""
        bad = _both(drift)[1].isnan()
        whole = bool((bad.all(-1) == bad.any(-1)).all()) and not bool(bad.all())
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
        source, candidate = _both(drift)
        return bool(candidate.isinf().any()) or bool((source.abs() > min(LARGEST.values())).any())

    def explain(self, drift: Drift) -> Cause | None:
        """Infinity by name; or the format whose range, when the oracle is clipped to it, gives the candidate."""
        source, candidate = _both(drift)
        infinite = candidate.isinf()
        if bool(infinite.any()):
            largest = float(source[infinite].abs().min())
            says = f"Infinity begins here: {_places(infinite)}, where the source's values start at {largest:.4g}"
            return Cause("overflow", drift.module, 0.99, float("inf"), None, f"{says}: use a format with more range")
        for name, largest in LARGEST.items():
            after = mapped(drift, lambda tensor, largest=largest: tensor.clamp(-largest, largest))  # type: ignore[misc]
            if after <= drift.floor:
                says = f"Values are clipped at {largest:g}, the range of {name}: use bfloat16 or float32 here"
                return Cause("overflow", drift.module, 0.98, drift.before, after, says)
        return None


@dataclass(frozen=True)
class Clipped:
    """Finite values that all stop at one magnitude, whichever it is."""

    kinds: tuple[str, ...] = ("overflow",)

    def applies(self, drift: Drift) -> bool:
        """Whether in some step several values have the largest magnitude."""
        return any(_at_limit(seen[drift.tensor]) > 1 for seen in drift.candidate_output if drift.tensor in seen)

    def explain(self, drift: Drift) -> Cause | None:
        """The source with each step's values clipped at the candidate's largest."""
        label, clipped, limits = drift.tensor, [], []
        for mine, theirs in zip(drift.candidate_output, drift.source_output, strict=False):
            limit = float(mine[label].abs().amax()) if label in mine else float("inf")
            limits.append(limit)
            clipped.append({**theirs, label: theirs[label].clamp(-limit, limit)} if label in theirs else theirs)
        says = f"Values are clipped at {min(limits):.4g}: a format or a clamp with too little range"
        return cause(drift, Outcome(Trial("overflow", says), drift.distance(clipped)))


def _at_limit(values: torch.Tensor) -> int:
    """How many values have the largest magnitude."""
    sizes = values.abs()
    return int((sizes == sizes.amax()).sum())


NAN = NanOrigin()
CLIPPED = Clipped()
OVERFLOW = Overflow()
