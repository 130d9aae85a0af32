"""The steps of a generation: through the model at first, then as a recorded program where that gives the same bits."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from transformers.cache_utils import Cache

from porter.decode_program import DecodeProgram, checked_step, model_step, record_step
from porter.models.cache_argument import cache_keyword

RECORDING_PAYS_FROM = 8
"""Decode steps from which recording one and checking another is worth the time. An estimate, not measured."""

Way = Literal["model", "recorded", "checked", "replayed"]


class Decoder:
    """Feeds tokens to `model` over `cache`, one step at a time.

    `way` says how the last step was run, `refusal` why steps are not replayed (empty while nothing speaks against it).
    """

    def __init__(self, model: nn.Module, cache: Cache | None, steps: int) -> None:
        """`steps`: how many decode steps are to be expected; `cache`: None for a model that has one of its own making,
        or none at all, and is then given all tokens again at each step."""
        self.model, self.cache = model, cache
        self.way: Way = "model"
        self.refusal = "" if steps >= RECORDING_PAYS_FROM else f"fewer than {RECORDING_PAYS_FROM} steps"
        self._program: DecodeProgram | None = None
        self._own: Any = None
        if cache is None:
            self.refusal = "the model does not take porter's cache"

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, 1, vocabulary] of the last of `tokens` [batch, length]; the next call overwrites them."""
        if self.cache is None:
            return self._without_cache(tokens)
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

    def _without_cache(self, tokens: torch.Tensor) -> torch.Tensor:
        keyword = cache_keyword(self.model)
        if not keyword:
            self._own = tokens if self._own is None else torch.cat([self._own, tokens], dim=1)
            return self.model(self._own).logits[:, -1:]  # type: ignore[no-any-return]
        output = self.model(tokens, use_cache=True, **{keyword: self._own})
        self._own = getattr(output, keyword)
        return output.logits[:, -1:]  # type: ignore[no-any-return]

    def _prepare(self, tokens: torch.Tensor) -> tuple[DecodeProgram | str, torch.Tensor]:
        assert self.cache is not None, "a step is prepared over a cache"
        if self._program is None:
            self.way = "recorded"
            return record_step(self.model, self.cache, tokens)
        self.way = "checked"
        return checked_step(self._program, tokens)
