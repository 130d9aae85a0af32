"""Right parameters that a kernel reads in another layout than they are stored in."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import parts
from porter.alignment.hypotheses.surgery import set_parameter
from porter.alignment.hypotheses.trial import Trial, TrialHypothesis

Layout = Callable[[torch.Tensor], torch.Tensor]


def _trials(drift: Drift) -> Iterator[Trial]:
    if drift.lane != "native":
        return  # Replayed in float64 no kernel runs, so what differs is mathematics or the values.
    for path, part in parts(drift.source_module, drift.forced):
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.dim() > 1 and parameter.shape[-1] == parameter.shape[-2]:
                says = f"The kernel reads {name} transposed: hand it over in the layout that the operator documents"
                yield Trial("weight-transposed", says, _read(path, name, lambda w: w.transpose(-1, -2)), part=path)
        weight = part._parameters.get("weight")
        if drift.holds_codes and path == "" and (weight is None or weight.dim() == 2):
            for offset in OFFSETS:
                says = f"The kernel adds {offset:+g} to the weight's codes: take the offset that the scheme has"
                yield Trial("zero-point", says, _with_offset(offset))
        sizes = [getattr(part, attribute, None) for attribute in ("num_heads", "qk_nope_head_dim", "v_head_dim")]
        expanding = part._modules.get("kv_b_proj")
        if expanding is not None and isinstance(sizes[0], int) and sizes[1] == sizes[2]:
            says = "The kernel takes the rows of kv_b_proj for values first: they are a head's keys, then its values"
            owner = f"{path}.kv_b_proj".lstrip(".")
            yield Trial("weight-permuted", says, _read(owner, "weight", _values_first(sizes[0])), part=owner)


OFFSETS = (1.0, -1.0, 8.0, -8.0, 128.0, -128.0)
"""What kernels add to codes by mistake: offsets with the wrong sign or twice, and unsigned codes read as signed."""


def _with_offset(offset: float) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        for path, part in list(parts(module)):
            weight = part._parameters.get("weight")
            if weight is not None and weight.dim() == 2:
                step = weight.abs().amax(-1, keepdim=True) / 127.0
                set_parameter(module.get_submodule(path), "weight", weight + offset * step)

    return change


def _values_first(heads: int) -> Layout:
    return lambda weight: torch.cat(weight.unflatten(0, (heads, 2, -1)).flip(1).unbind(0)).flatten(0, 1)


def _read(path: str, name: str, layout: Layout) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        owner = module.get_submodule(path)
        set_parameter(owner, name, layout(owner.get_parameter(name)).contiguous())

    return change


HYPOTHESIS = TrialHypothesis(("weight-transposed", "weight-permuted", "zero-point"), _trials)
