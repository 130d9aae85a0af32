"""The shared expert of a mixture left out, added twice, or not gated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import parts
from porter.alignment.hypotheses.surgery import map_output
from porter.alignment.hypotheses.trial import Change, Trial, TrialHypothesis

OPEN = 1e4
"""A gate logit whose sigmoid is 1 in every dtype."""


def _map(path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda module: map_output(module.get_submodule(path), change)


NAMES = ("shared_experts", "shared_expert")


def _own_trials(drift: Drift) -> Iterator[Trial]:
    """Where the drifting module is the shared expert itself."""
    name = drift.source.rpartition(".")[2]
    if name in NAMES:
        says = f"{name} puts out zeros: it is left out of the mixture's output; add it to the routed experts'"
        yield Trial("shared-expert", says, _map("", torch.zeros_like))
        yield Trial("shared-expert", f"{name} is added twice to the mixture's output", _map("", lambda out: 2 * out))


def _trials(drift: Drift) -> Iterator[Trial]:
    yield from _own_trials(drift)
    for path, part in parts(drift.source_module, drift.forced):
        for name in NAMES:
            if not isinstance(part._modules.get(name), nn.Module):
                continue
            shared = f"{path}.{name}".lstrip(".")
            says = f"{name} is left out of the mixture's output: add it to the routed experts'"
            yield Trial("shared-expert", says, _map(shared, torch.zeros_like), part=shared)
            says = f"{name} is added twice to the mixture's output (once per rank, or by the kernel and again after it)"
            yield Trial("shared-expert", says, _map(shared, lambda output: 2 * output), part=shared)
        if "shared_expert_gate" in part._modules:
            gate = f"{path}.shared_expert_gate".lstrip(".")
            says = "shared_expert_gate is not applied: multiply the shared expert by the sigmoid of its gate"
            yield Trial("shared-expert", says, _map(gate, lambda output: torch.full_like(output, OPEN)), part=gate)
        if "experts" in part._modules and "gate" in part._modules:
            routed = f"{path}.experts".lstrip(".")
            says = "Only the shared expert reaches the mixture's output: the routed experts are left out"
            yield Trial("shared-expert", says, _map(routed, torch.zeros_like), part=routed)


HYPOTHESIS = TrialHypothesis(("shared-expert",), _trials)
