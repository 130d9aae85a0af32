"""How a candidate's parameter relates to the source's: the frame in which parameter hypotheses are tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.surgery import set_parameter, shallow_copy
from porter.alignment.hypotheses.trial import PARTIAL_NEEDED, confidence
from porter.alignment.model_call import CannotRun
from porter.alignment.observation import worst
from porter.alignment.report import Cause

ROUNDING = 1e-6
"""A relation that leaves more than this (float32 storage, summed) does not hold exactly."""


@dataclass(frozen=True)
class Parameter:
    """A parameter by its name in the source module, in float64: what the candidate should have, and what it has."""

    name: str
    source: torch.Tensor
    candidate: torch.Tensor
    key: str
    """Its key in `Drift.weights`; `name` is what a user knows it by."""
    quantized: bool = False
    """Whether the candidate stores it quantized."""
    floor: float = ROUNDING
    """A relation holds that leaves no more than this: what storage rounds, or the scheme costs."""
    storage: float = 0.0
    """What storing it rounds, relative."""


@dataclass(frozen=True)
class Finding:
    """A relation that was found: the distance that it leaves, and what to tell the user."""

    kind: str
    after: float
    says: str


Relation = Callable[[Drift, Parameter], Iterable[Finding]]


def relative(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    """|tensor - reference| / |reference| in float64; infinite where the shapes or the reference forbid it."""
    if tensor.shape != reference.shape:
        return float("inf")
    reference = reference.to(torch.float64)
    norm = float(reference.norm())
    error = float((tensor.to(torch.float64) - reference).norm())
    return error / norm if norm > 0 else (0.0 if error == 0 else float("inf"))


def drifted(drift: Drift) -> Iterator[Parameter]:
    """The parameters that differ from those of the source module, which are as the candidate should store them."""
    tensors = dict(drift.source_module.named_parameters()) | dict(drift.source_module.named_buffers())
    for name, (source, candidate) in drift.weights.items():
        expected = tensors.get(name, source).detach()
        expected = expected.to(torch.float64) if expected.is_floating_point() else expected
        if candidate.shape == expected.shape and relative(candidate, expected) > ROUNDING:
            known_as = name if "." in name else f"{drift.source}.{name}"
            storage = storage_rounding(drift)
            floor = max(ROUNDING, storage, drift.expected.get(name, 0.0))
            yield Parameter(known_as, expected, candidate, name, name in drift.quantized, floor, storage)


def with_parameters_of_candidate(drift: Drift) -> Drift | None:
    """What is left of the drift once the source has the candidate's parameters; None where nothing is.

    The drift itself where they do not bring the source nearer: something makes up for them, or they do not fit.
    """
    wrong = list(drifted(drift))
    copied = shallow_copy(drift.source_module)
    for parameter in wrong:
        set_parameter(copied, parameter.key, parameter.candidate)
    try:
        outputs = drift.run(copied)
    except CannotRun:
        return drift
    tensor, after, step = worst(drift.candidate_output, outputs)
    if after <= drift.floor:
        return None
    if not after < drift.before:
        return drift
    return dataclasses.replace(
        drift, source_module=copied, source_output=outputs, weights={}, tensor=tensor, before=after, step=step
    )


def storage_rounding(drift: Drift) -> float:
    """The relative error of rounding to the narrowest floating-point dtype of the candidate's parameters.

    A weight that was changed and then stored (1.02 times a bfloat16 weight, say) is off its relation by that much.
    """
    if drift.candidate_module is None:
        return torch.finfo(drift.dtype).eps / 2
    floating = [p.dtype for p in drift.candidate_module.parameters() if p.is_floating_point()]
    return max((torch.finfo(dtype).eps / 2 for dtype in floating), default=0.0)


@dataclass(frozen=True)
class ParameterHypothesis:
    """A relation between two parameters, tried on each parameter that differs."""

    kinds: tuple[str, ...]
    relation: Relation = field(repr=False)

    def applies(self, drift: Drift) -> bool:
        """Whether any parameter of the module differs."""
        return next(drifted(drift), None) is not None

    def explain(self, drift: Drift) -> Cause | None:
        """The relation that explains the largest part of a parameter's difference."""
        found: list[Cause] = []
        for parameter in drifted(drift):
            before = relative(parameter.candidate, parameter.source)
            for finding in self.relation(drift, parameter):
                if finding.after <= PARTIAL_NEEDED * before:
                    sure = confidence(before, finding.after, parameter.floor)
                    found.append(Cause(finding.kind, drift.module, sure, before, finding.after, finding.says))
        return max(found, key=lambda c: c.confidence, default=None)
