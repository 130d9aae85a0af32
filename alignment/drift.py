"""What a hypothesis gets: a drifting module, its float64 source, and how far a changed source is from the port.

A hypothesis plants a known bug in (a copy of) the source module and asks whether that distance vanishes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from porter.alignment.observation import Observation, worst

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Run = Callable[[nn.Module, Callable[[tuple[Any, ...], dict[str, Any]], Inputs] | None], list[Observation]]


@dataclass(frozen=True)
class Drift:
    """A module that introduces an error over its budget.

    `source_module` is the source in float64, with the weights that the candidate should have (never mutate it: `fresh`
    and `run_source` copy it). For a fused candidate module it holds the sources as children under their own names and
    concatenates their outputs. `lane` is "exact" where the float64 replay differs (mathematics or weights), "native"
    where only the candidate's own dtype and kernels do; `candidate_output` is of that lane, one Observation (tensors by
    label, float64) per recorded step.

    An Observation holds the module's outputs ("output", "output.1", ...) and what it hands to its children
    ("o_proj.input", ...). Children are forced to the source's outputs on golden inputs, on both sides, unless a
    hypothesis touched them (parameter, attribute or forward replaced), in which case they run on what they are given.
    Hooks that a hypothesis puts on a child see, and may change, its forced output.
    """

    module: str
    source: str
    kind: str
    lane: str
    tensor: str
    step: int
    before: float
    """The candidate's distance from the source: the largest relative L2 difference of an observed tensor."""
    floor: float
    """Distances up to this are zero: what float64 (exact lane) or the candidate's dtype (native lane) resolves."""
    source_module: nn.Module
    candidate_module: nn.Module | None
    source_output: list[Observation]
    candidate_output: list[Observation]
    config: Any = None
    weights: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Parameters in float64 by the source module's own name: (the source's, the candidate's unfused, dequantized)."""
    elsewhere: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """The source model's parameters of other modules, by full name: one may have been loaded in place of this one's."""
    expected: Mapping[str, float] = field(default_factory=dict)
    """What the candidate's dtype or scheme may cost each of `weights`, relative L2; 0 where a copy must be exact."""
    quantized: frozenset[str] = frozenset()
    """Those of `weights` that the candidate stores quantized."""
    dtype: torch.dtype = torch.float32
    """What the candidate computes in."""
    keep: Sequence[Tensor | None] = ()
    """Per recorded call which positions [B, S] hold tokens (of the others nothing is observed); None: all."""
    forced: frozenset[str] = frozenset()
    """Children that are given their recorded outputs on both sides: nothing inside them brings this drift about."""
    states: Sequence[str] = ()
    """What the module keeps from step to step in fewer bits than the source ("recurrent_states in float16"), where
    that alone is over its budget."""
    run_candidate: Callable[[], list[Observation]] | None = field(repr=False, default=None)
    """Runs the candidate once more, as it ran for `candidate_output`."""
    run_module: Run = field(repr=False, default=lambda module, inputs: [])

    @property
    def holds_codes(self) -> bool:
        """Whether the candidate stores a weight of the module as integers."""
        held = () if self.candidate_module is None else self.candidate_module.state_dict(keep_vars=True).values()
        return bool(self.quantized) or any(tensor.dtype in (torch.int8, torch.int32) for tensor in held)

    def fresh(self) -> nn.Module:
        """A deep copy of the float64 source module, free to be changed."""
        return copy.deepcopy(self.source_module)

    def run(
        self,
        module: nn.Module,
        inputs: Callable[[tuple[Any, ...], dict[str, Any]], Inputs] | None = None,
    ) -> list[Observation]:
        """Replay `module` (the source or a changed copy of it) on the golden inputs of every step.

        `inputs(args, kwargs)` returns the arguments to use instead. Raises what the module raises.
        """
        with torch.no_grad():
            return self.run_module(module, inputs)

    def run_source(
        self,
        mutate: Callable[[nn.Module], None] | None = None,
        patch_inputs: Callable[[tuple[Any, ...], dict[str, Any]], Inputs] | None = None,
        patch_output: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Observation]:
        """Replay a fresh copy that `mutate` changed in place; `patch_output` maps the tensor "output" of every step."""
        module = self.fresh()
        if mutate is not None:
            mutate(module)
        observations = self.run(module, patch_inputs)
        if patch_output is None:
            return observations
        return [{**seen, "output": patch_output(seen["output"])} for seen in observations]

    def distance(self, outputs: Sequence[Observation]) -> float:
        """Largest relative L2 difference between `outputs` (as `run` returns them) and the candidate's.

        Infinite where a tensor has another shape or is not finite.
        """
        return worst(self.candidate_output, outputs)[1]
