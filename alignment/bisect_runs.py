"""Whole runs on the golden's tokens, counted and remembered, and what rounding makes of the logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from porter.alignment.bisect_units import Replacements
from porter.alignment.budget import least
from porter.alignment.calls import Recorded, mapped, new_cache
from porter.alignment.candidate import compute_dtype
from porter.alignment.lanes import natively, real
from porter.alignment.model_call import CannotRun, called
from porter.alignment.precision_swap import exact
from porter.alignment.report import Tokens
from porter.alignment.tokens import TokenCount
from porter.errors import PorterError

Put = tuple[frozenset[str], frozenset[str]]


@dataclass(frozen=True)
class Yardstick:
    """Divergences (KL, nats per position) from the golden that rounding explains: in the mean and at the worst."""

    kl_mean: float
    kl_max: float
    unmeasured: str = ""
    """Why the source could not be run in one of two precisions; the limits rest on the other alone."""

    def met_by(self, tokens: Tokens) -> bool:
        """Whether these logits are as near."""
        mean, most = tokens.kl_mean, tokens.kl_max
        return mean is not None and most is not None and mean <= self.kl_mean and most <= self.kl_max


@dataclass
class Runs:
    """Runs `model` on the recorded calls of the root, decode steps on the golden's tokens."""

    model: nn.Module
    recorded: Recorded
    advance: Callable[[int], None]
    count: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    """What was put back when the model raised, and what it raised."""
    _known: dict[Put, Tokens | None] = field(default_factory=dict)

    def tokens(
        self, replacements: Replacements | None = None, sites: Sequence[str] = (), modules: Sequence[str] = ()
    ) -> Tokens | None:
        """The logits against the golden's with that put back; None where the model raises."""
        key = frozenset(sites), frozenset(modules)
        if key not in self._known:
            context = nullcontext() if replacements is None else replacements.put_back(sites, modules)
            try:
                self._known[key] = self.of(self.model, context)
            except CannotRun as error:
                self._known[key] = None
                self.failures[", ".join([*sites, *modules])] = str(error)
        return self._known[key]

    def of(self, model: nn.Module, context: AbstractContextManager[Any]) -> Tokens:
        """One run of any model on the golden's tokens. Raises CannotRun, PorterError without logits."""
        found, caches = TokenCount(), dict[int, Any]()
        self.count += 1
        self.advance(1)
        with context, torch.no_grad():
            for record, golden in zip(self._roots, self.golden_logits, strict=True):
                if record.batch not in caches:
                    caches = {record.batch: new_cache(getattr(model, "config", None))}
                inputs = mapped(self.recorded.value(record.inputs), natively, caches[record.batch])
                logits = getattr(called(model, *inputs["args"], **inputs["kwargs"]), "logits", None)
                if not isinstance(logits, Tensor):
                    raise PorterError("the candidate returns no logits: there are no tokens to restore")
                found.add(self._rows(logits[:, -golden[1] :], record), golden[0])
        result = found.result()
        assert result is not None, "every golden has a token"
        return result

    @cached_property
    def _roots(self) -> list[Any]:
        return list(self.recorded.records.get("", []))

    @cached_property
    def golden_logits(self) -> list[tuple[Tensor, int]]:
        """Per recorded call, the golden's logits [real positions, vocabulary] and how many positions it gave."""
        found = []
        for record in self._roots:
            logits = getattr(self.recorded.golden.value(record.outputs), "logits", None)
            if not isinstance(logits, Tensor) or logits.dim() != 3:
                raise PorterError(f"{self.recorded.golden.path}: holds no logits of the whole model; record the model")
            found.append((self._rows(logits, record), int(logits.shape[1])))
        if not found:
            raise PorterError(f"{self.recorded.golden.path}: has no record of the whole model; record it again")
        return found

    def _rows(self, logits: Tensor, record: Any) -> Tensor:
        keep = self.recorded.keep(record)
        rows = logits if keep is None or keep.shape != logits.shape[:2] else real(logits, keep.to(logits.device))
        return rows.reshape(-1, logits.shape[-1])


def yardstick(runs: Runs, source: nn.Module, candidate: nn.Module, factor: float) -> Yardstick:
    """What rounding does: the source in the candidate's precision, and in float64, against the golden.

    A divergence grows with the square of the errors, and another rounding may err `2 * factor` times as much. No less
    than an error of one unit roundoff of the logits. PorterError where the source cannot be run either way.
    """
    measured, why = [], ""
    for precision in (nullcontext(), exact(source)):
        try:
            measured.append(runs.of(source, precision))
        except CannotRun as error:
            why = str(error)
    if not measured:
        raise PorterError(f"the golden's source cannot be run here, so nothing can be put back: {why}")
    logits = torch.cat([rows.to(torch.float64).flatten() for rows, _ in runs.golden_logits])
    floor = 0.5 * (least(compute_dtype(candidate)) * float(logits.square().mean().sqrt())) ** 2
    slack = (2.0 * factor) ** 2
    means = [tokens.kl_mean or 0.0 for tokens in measured]
    most = [tokens.kl_max or 0.0 for tokens in measured]
    return Yardstick(slack * max(floor, *means), slack * max(floor, *most), why)
