"""Attention logits scaled by another factor: known mistakes by name, otherwise the factor that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import attentions
from porter.alignment.hypotheses.trial import Outcome, Trial, best, cause, distance, solve
from porter.alignment.report import Cause

GRID = tuple(2.0**exponent for exponent in range(-8, 9))
"""Multiples of the source's own scale."""


def with_scale(path: str, scale: float) -> Callable[[nn.Module], None]:
    """Sets the softmax scale of the attention at `path`."""

    def change(module: nn.Module) -> None:
        module.get_submodule(path).scaling = scale  # type: ignore[assignment]

    return change


def yarn_mscale(config: Any) -> float | None:
    """The factor m by which yarn's mscale_all_dim multiplies attention temperature (the scale carries m squared).

    m = 0.1 * mscale_all_dim * ln(factor) + 1, as in DeepSeek-V3's modelling code; None without such a setting.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    factor, all_dim = rope.get("factor"), rope.get("mscale_all_dim")
    if not factor or not all_dim or factor <= 1:
        return None
    return 0.1 * float(all_dim) * math.log(float(factor)) + 1.0


def named_scales(attention: nn.Module) -> Iterator[tuple[float, str]]:
    """(scale, how a port comes to use it) of the known mistakes."""
    own = float(attention.scaling)  # type: ignore[arg-type]
    mscale = yarn_mscale(getattr(attention, "config", None))
    if mscale is not None:
        yield own / mscale**2, f"yarn's mscale_all_dim squared ({mscale**2:.4g}) is left out"
        yield own / mscale, f"yarn's mscale_all_dim ({mscale:.4g}) is applied once and not squared"
        yield own * mscale**2, f"yarn's mscale_all_dim squared ({mscale**2:.4g}) is applied twice"
    yield 1.0, "no scale is applied"
    yield own**2, "the scale is applied twice"
    for name in ("head_dim", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"):
        dim = getattr(attention, name, None)
        if isinstance(dim, int) and dim > 0:
            yield dim**-0.5, f"it is {name} ** -0.5 = {dim} ** -0.5"
            yield 1.0 / dim, f"it is 1 / {name} = 1 / {dim}, without the square root"
    config = getattr(attention, "config", None)
    hidden, heads = getattr(config, "hidden_size", None), getattr(config, "num_attention_heads", None)
    if hidden and heads:
        yield (hidden / heads) ** -0.5, f"it is (hidden_size / num_attention_heads) ** -0.5 = {hidden // heads} ** -0.5"


@dataclass(frozen=True)
class AttentionScale:
    """Tries the known mistakes, then solves for the scale."""

    kinds: tuple[str, ...] = ("attention-scale",)

    def applies(self, drift: Drift) -> bool:
        """Whether there is a softmax attention in the module."""
        return bool(attentions(drift.source_module, drift.forced))

    def explain(self, drift: Drift) -> Cause | None:
        """The scale that comes closest to the candidate."""
        outcomes = [
            self._named(drift, *found) or self._solved(drift, *found)
            for found in attentions(drift.source_module, drift.forced)
        ]
        return cause(drift, min(outcomes, key=lambda outcome: outcome.after, default=None))

    def _named(self, drift: Drift, path: str, attention: nn.Module) -> Outcome | None:
        own = float(attention.scaling)  # type: ignore[arg-type]
        tried: dict[float, Trial] = {}
        for scale, words in named_scales(attention):
            # The first name of a value is the more telling one.
            if not any(math.isclose(scale, other, rel_tol=1e-9) for other in (own, *tried)):
                tried[scale] = Trial("attention-scale", _says(scale, own, words), with_scale(path, scale), part=path)
        found = best(drift, tried.values())
        return found if found is not None and found.after <= drift.floor else None

    def _solved(self, drift: Drift, path: str, attention: nn.Module) -> Outcome:
        own = float(attention.scaling)  # type: ignore[arg-type]
        factor, after = solve(lambda multiple: distance(drift, with_scale(path, own * multiple)), GRID)
        says = _says(own * factor, own, f"{factor:.5g} times the source's")
        return Outcome(Trial("attention-scale", says, part=path), after)


def _says(scale: float, own: float, words: str) -> str:
    return f"Attention logits are scaled by {scale:.6g} and not by {own:.6g} ({words}): set it to {own:.6g}"


HYPOTHESIS = AttentionScale()
