"""A residual connection left out, added twice, or taken from the wrong side of the norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import branches
from porter.alignment.hypotheses.surgery import map_output
from porter.alignment.hypotheses.trial import Change, Trial, TrialHypothesis

Correction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(residual, normed residual, the layer's input) -> what the bug adds to the layer's output."""

BUGS: tuple[tuple[str, Correction], ...] = (
    ("the residual is not added to {branch}'s output: add the input of {norm}", lambda r, n, x: -r),
    ("the residual is added twice to {branch}'s output: add it once", lambda r, n, x: r),
    (
        "the residual of {branch} is taken after {norm} and not before it: keep the input of {norm}",
        lambda r, n, x: n - r,
    ),
    ("the residual of {branch} is the layer's input and not the input of {norm}", lambda r, n, x: x - r),
)


def _tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    found = args[0] if args else kwargs["hidden_states"]
    assert isinstance(found, torch.Tensor), "a layer's and a norm's first input is the hidden states"
    return found


def _correct(branch: str, norm: str, correction: Correction) -> Change:
    def change(module: nn.Module) -> None:
        seen: dict[str, torch.Tensor] = {}

        def keep_input(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen["input"] = _tensor(args, kwargs)

        def keep_norm(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
            seen["residual"], seen["normed"] = _tensor(args, kwargs), output

        module.register_forward_pre_hook(keep_input, with_kwargs=True)
        module.get_submodule(norm).register_forward_hook(keep_norm, with_kwargs=True)
        map_output(
            module.get_submodule(branch),
            lambda output: output + correction(seen["residual"], seen["normed"], seen["input"]),
        )

    return change


def _trials(drift: Drift) -> Iterator[Trial]:
    for branch, norm in branches(drift.source_module):
        for words, correction in BUGS:
            says = words.format(branch=branch, norm=norm)
            yield Trial("residual-missing", says[0].upper() + says[1:], _correct(branch, norm, correction), part=branch)
        yield Trial(
            "residual-missing",
            f"{branch} does not contribute to the layer's output: add its output to the residual",
            lambda module, branch=branch: map_output(module.get_submodule(branch), torch.zeros_like),  # type: ignore[misc]
            part=branch,
        )


HYPOTHESIS = TrialHypothesis(("residual-missing",), _trials)
