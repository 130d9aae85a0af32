"""Routers: expert choices compared as sets, and flips told apart by the margin with which the oracle chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from porter.alignment.observation import Observation

LOGITS, COMBINE = "output", "output.combine"


@dataclass(frozen=True)
class Choice:
    """A router's decision: `experts` [T, k] chosen, of `count`; `logits` [T, E] where the router returned them."""

    experts: Tensor
    count: int
    logits: Tensor | None

    def sets(self) -> Tensor:
        """Boolean [T, E]: which experts each token goes to."""
        chosen = torch.zeros(self.experts.shape[0], self.count, dtype=torch.bool, device=self.experts.device)
        return chosen.scatter_(1, self.experts, True)

    def flipped(self, other: Choice) -> Tensor | None:
        """Boolean [T], on the CPU: which tokens go to other experts; None where the two are of other tokens."""
        if self.experts.shape != other.experts.shape:
            return None
        count = max(self.count, other.count)
        mine, theirs = (Choice(each.experts.cpu(), count, None).sets() for each in (self, other))
        return (mine != theirs).any(dim=1)


@dataclass(frozen=True)
class Flips:
    """Tokens [T] whose expert set differs from the oracle's, and those of them where rounding can explain it."""

    flipped: Tensor
    benign: Tensor

    @property
    def excess(self) -> int:
        """How many tokens flipped although their scores were not near."""
        return int((self.flipped & ~self.benign).sum())


def choice_of(module: nn.Module, output: Any) -> tuple[Choice | None, Observation]:
    """The decision in a router's output, with its logits and its weights as a dense [T, E]; None for other modules.

    A router returns integers [T, k] and floating-point weights of the same shape, in any order of the experts.
    """
    parts = [part for part in output if isinstance(part, Tensor)] if isinstance(output, tuple | list) else []
    experts = next((p for p in parts if p.dtype in (torch.int64, torch.int32) and p.dim() == 2), None)
    if experts is None:
        return None, {}
    weights = next((p for p in parts if p.is_floating_point() and p.shape == experts.shape), None)
    if weights is None:
        return None, {}
    experts = experts.to(torch.int64)
    tokens = experts.shape[0]
    logits = next(
        (p for p in parts if p is not weights and p.is_floating_point() and p.dim() == 2 and p.shape[0] == tokens), None
    )
    count = int(logits.shape[1]) if logits is not None else _count(module, experts)
    dense = weights.new_zeros(tokens, count).scatter_(1, experts, weights)
    found = {COMBINE: dense}
    if logits is not None:
        found = {LOGITS: logits.detach().clone(), **found}
    return Choice(experts, count, logits), found


def _count(module: nn.Module, experts: Tensor) -> int:
    named = [getattr(module, name, None) for name in ("num_experts", "n_routed_experts", "num_local_experts")]
    highest = int(experts.max()) + 1 if experts.numel() else 1
    return max([highest, *(value for value in named if isinstance(value, int))])


def scores_for_choice(module: nn.Module, logits: Tensor) -> Tensor:
    """What the source router ranks, [T, E] float64: sigmoid plus correction bias, or the logits themselves."""
    bias = getattr(module, "e_score_correction_bias", None)
    logits = logits.to(torch.float64)
    return logits.sigmoid() + bias.to(torch.float64) if isinstance(bias, Tensor) else logits


def flips(module: nn.Module, candidate: Choice, oracle: Choice, noise: float) -> Flips:
    """Compare expert sets. A flip is benign where the scores that decided it lie within `noise` of each other.

    `module` is the source router; `noise` is the largest difference of two scores that rounding can bring about.
    """
    mine, theirs = candidate.sets(), oracle.sets()
    if mine.shape != theirs.shape:
        everything = torch.ones(theirs.shape[0], dtype=torch.bool)
        return Flips(everything, ~everything)
    flipped = (mine != theirs).any(dim=1)
    if oracle.logits is None or not bool(flipped.any()):
        return Flips(flipped, torch.zeros_like(flipped))
    scores = scores_for_choice(module, oracle.logits)
    infinity = torch.tensor(torch.inf, dtype=scores.dtype, device=scores.device)
    lost = torch.where(theirs & ~mine, scores, -infinity).amax(dim=1)
    gained = torch.where(mine & ~theirs, scores, infinity).amin(dim=1)
    near = (lost - gained).abs() <= noise
    return Flips(flipped, flipped & (near | _near_groups(module, scores, mine, theirs, noise)))


def _near_groups(module: nn.Module, scores: Tensor, mine: Tensor, theirs: Tensor, noise: float) -> Tensor:
    """Tokens whose last chosen group was as good as the best one left out, of routers that choose groups first."""
    groups, kept = getattr(module, "num_group", None), getattr(module, "topk_group", None)
    none = torch.zeros(scores.shape[0], dtype=torch.bool, device=scores.device)
    if not isinstance(groups, int) or not isinstance(kept, int) or not 0 < kept < groups:
        return none
    by_group = scores.view(scores.shape[0], groups, -1).topk(2, dim=-1)[0].sum(dim=-1)
    ranked = by_group.sort(dim=-1, descending=True)[0]
    # A group's score adds two experts' scores, so it carries twice their noise.
    return (ranked[:, kept - 1] - ranked[:, kept]) <= 2 * noise


def score_noise(module: nn.Module, rounded: Choice | None, oracle: Choice, factor: float) -> float:
    """The difference of two scores that rounding can make: twice the largest seen when the source itself rounds."""
    if rounded is None or rounded.logits is None or oracle.logits is None or not oracle.logits.numel():
        return 0.0
    exact = scores_for_choice(module, oracle.logits)
    worst = (scores_for_choice(module, rounded.logits) - exact).abs().max()
    return 2.0 * factor * float(worst)
