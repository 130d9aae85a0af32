"""The steps of a generation: through the model at first, then as a recorded program where that gives the same bits."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from transformers.cache_utils import Cache

from porter.decode_program import DecodeProgram, checked_step, model_step, record_step

RECORDING_PAYS_FROM = 8
"""Decode steps from which recording one and checking another is worth the time. An estimate, not measured."""

Way = Literal["model", "recorded", "checked", "replayed"]


class Decoder:
    """Feeds tokens to `model` over `cache`, one step at a time.

    `way` says how the last step was run, `refusal` why steps are not replayed (empty while nothing speaks against it).
    """

    def __init__(self, model: nn.Module, cache: Cache, steps: int) -> None:
        """`steps`: how many decode steps are to be expected."""
        self.model, self.cache = model, cache
        self.way: Way = "model"
        self.refusal = "" if steps >= RECORDING_PAYS_FROM else f"fewer than {RECORDING_PAYS_FROM} steps"
        self._program: DecodeProgram | None = None

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, 1, vocabulary] of the last of `tokens` [batch, length]; the next call overwrites them."""
        started = int(self.cache.get_seq_length()) > 0
        if self.way in ("checked", "replayed") and self._program is not None and tokens.shape[1] == 1:
            self.way = "replayed"
            return self._program.step(tokens)
        if self.refusal or not started or tokens.shape[1] != 1:
            self.way = "model"
            return model_step(self.model, self.cache, tokens)
        outcome, logits = self._prepare(tokens)
        self._program = None if isinstance(outcome, str) else outcome
        self.refusal = outcome if isinstance(outcome, str) else ""
        return logits

    def _prepare(self, tokens: torch.Tensor) -> tuple[DecodeProgram | str, torch.Tensor]:
        if self._program is None:
            self.way = "recorded"
            return record_step(self.model, self.cache, tokens)
        self.way = "checked"
        return checked_step(self._program, tokens)
