"""A bias that is missing or added twice, seen in the parameters or in the output."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import parts
from porter.alignment.hypotheses.parameter_scale import factor_of
from porter.alignment.hypotheses.relation import Finding, Parameter, ParameterHypothesis, relative
from porter.alignment.hypotheses.surgery import set_parameter
from porter.alignment.hypotheses.trial import Trial, TrialHypothesis


def _scaled(name: str, factor: float) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        value = module.get_parameter(name)
        set_parameter(module, name, None if factor == 0.0 else value * factor)

    return change


def _trials(drift: Drift) -> Iterator[Trial]:
    for path, part in parts(drift.source_module, drift.forced):
        bias = part._parameters.get("bias")
        if bias is None or not bias.any():
            continue
        name = f"{path}.bias".lstrip(".")
        yield Trial("bias-missing", f"{name} is not added: load it and add it", _scaled(name, 0.0), part=path)
        yield Trial("bias-doubled", f"{name} is added twice: add it once", _scaled(name, 2.0), part=path)
        says = f"{name} is subtracted where the source adds it: flip its sign"
        yield Trial("bias-doubled", says, _scaled(name, -1.0), part=path)


def _relation(drift: Drift, parameter: Parameter) -> Iterator[Finding]:
    if not parameter.name.endswith("bias") or not parameter.source.any():
        return
    if not parameter.candidate.any():
        yield Finding("bias-missing", 0.0, f"{parameter.name} is zero or absent: load it")
    elif abs(factor_of(parameter.source, parameter.candidate) - 2.0) < 1e-2:
        after = relative(2 * parameter.source, parameter.candidate)
        says = f"{parameter.name} is twice the source's (added once per rank, or folded in twice): halve it"
        yield Finding("bias-doubled", after, says)


OUTPUT = TrialHypothesis(("bias-missing", "bias-doubled"), _trials)
PARAMETER = ParameterHypothesis(("bias-missing", "bias-doubled"), _relation)
