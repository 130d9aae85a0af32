"""Balances softmax routers that upstream trains without an auxiliary loss (DeepSeek-V2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

WEIGHT = 0.003
"""alpha_1 of DeepSeek-V2 (arXiv 2405.04434, section 3.1.2)."""


class RoutingBalance:
    """DeepSeek-V2's expert-level balance loss, sum of f_i P_i over experts (arXiv 2405.04434, section 2.2.3).

    f_i is the share of tokens sent to expert i, times experts / top_k; P_i the mean softmax score of expert i.
    Use as a context around training; nothing happens in models whose routers are balanced otherwise.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        chosen_by = [m for m in model.modules() if hasattr(m, "topk_method")]
        self.routers = [m for m in chosen_by if not hasattr(m, "e_score_correction_bias")]
        self._terms: list[torch.Tensor] = []
        self._handles: list[Any] = []

    def __enter__(self) -> RoutingBalance:
        self._handles = [router.register_forward_hook(self._count) for router in self.routers]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()

    def loss(self) -> torch.Tensor:
        """The weighted sum over the routers called since the last time it was asked for; 0 where there are none."""
        terms, self._terms = self._terms, []
        return WEIGHT * torch.stack(terms).sum() if terms else torch.zeros(())

    def _count(self, router: nn.Module, inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
        logits, _, indices = outputs
        experts = logits.shape[-1]
        share = torch.bincount(indices.flatten(), minlength=experts).to(logits.dtype) * (experts / indices.numel())
        self._terms.append((share * torch.softmax(logits, dim=-1).mean(dim=0)).sum())
