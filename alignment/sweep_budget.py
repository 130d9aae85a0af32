"""How long the sequences of a sweep may be: what the model's positions allow, and what a stated budget pays for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from porter.alignment.model_call import CannotRun
from porter.alignment.regimes import LONGEST, Regime, fitted, kinds, lengths, run_steps, steps, text
from porter.alignment.routing import choice_of
from porter.errors import PorterError

WORK = 2e12
"""Floating-point operations that the whole-model runs of a sweep may take: some minutes on one core."""

BYTES = 1 << 30
"""What the recording of one regime may take on disk, and the attention scores of one layer in memory."""

RUNS = 4
"""Whole runs per regime: the source recorded, rounded and in float64, and the candidate."""

PER_LAYER = 20
"""Tensors of the hidden size that a recording holds per layer and token, roughly."""

REPLAYED_LENGTH = 257
"""Lengths for the replay of every module, each of which costs some ten whole runs."""


@dataclass(frozen=True)
class Extent:
    """`longest` sequence, last position `far`, `vocabulary` size, whether tokens are `routed` to experts, and what
    limits the length."""

    longest: int
    far: int
    vocabulary: int
    routed: bool
    limit: str


@dataclass(frozen=True)
class Size:
    """What decides the work of a model."""

    parameters: int
    hidden: int
    layers: int
    heads: int

    def work(self, regime: Regime) -> float:
        """Operations of the regime's whole runs: two per parameter and token, and the attention's products."""
        tokens = regime.batch * regime.length
        return RUNS * tokens * (2.0 * self.parameters + 4.0 * self.layers * self.hidden * regime.length)

    def bytes(self, regime: Regime) -> float:
        """Bytes of the regime's recording, with attention probabilities, in float32."""
        tokens = regime.batch * regime.length
        return 4.0 * tokens * self.layers * (PER_LAYER * self.hidden + self.heads * regime.length)


def extent_of(source: nn.Module, longest: int | None) -> Extent:
    """The extent for `source`; `longest` replaces the budget, not the model's positions. PorterError if it exceeds them
    or is no length."""
    config: Any = source.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = int(getattr(config, "max_position_embeddings", None) or LONGEST)
    vocabulary, routed = int(config.vocab_size), _routed(source, int(config.vocab_size))
    if longest is not None:
        if not 1 <= longest <= positions:
            raise PorterError(f"--sweep-length {longest}: must be 1 to {positions}, the positions that the model has")
        return Extent(longest, positions - 1, vocabulary, routed, "--sweep-length")
    size = Size(
        sum(parameter.numel() for parameter in source.parameters()),
        int(config.hidden_size),
        int(config.num_hidden_layers),
        int(getattr(config, "num_attention_heads", 1)),
    )
    most = min(LONGEST, positions)
    affordable = [cut for cut in lengths(most) if _affordable(size, cut, positions - 1, routed)]
    if affordable[-1:] == [most]:
        why = "the model's positions" if most == positions else "a sweep's greatest length"
        return Extent(most, positions - 1, vocabulary, routed, why)
    why = f"a budget of {WORK:.0e} operations and {BYTES >> 20} MiB; --sweep-length N goes further"
    return Extent(affordable[-1] if affordable else 1, positions - 1, vocabulary, routed, why)


def _affordable(size: Size, cut: int, far: int, routed: bool) -> bool:
    everything = [fitted(kind, length, far) for length in lengths(cut) for kind in kinds(far, routed)]
    regimes = [regime for regime in everything if regime is not None]
    return sum(map(size.work, regimes)) <= WORK and max(map(size.bytes, regimes)) <= BYTES


def _routed(source: nn.Module, vocabulary: int) -> bool:
    """Whether any module of the source chooses experts."""
    found: list[bool] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        found.append(choice_of(module, output)[0] is not None)

    handles = [module.register_forward_hook(hook) for module in source.modules()]
    try:
        with torch.no_grad():
            run_steps(source, steps(Regime(2), text(vocabulary, 1, 2)))
    except CannotRun as error:
        raise PorterError(f"--sweep: the golden's source cannot be run here: {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    return any(found)
