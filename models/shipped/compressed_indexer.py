"""Trains the indexers over compressed keys of DeepSeek-V4 to select what the attention attends to."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from porter.models.shipped.indexer_alignment import DENSE_UNTIL


class CompressedIndexerAlignment:
    """As IndexerAlignment, over the compressed entries: KL(p || softmax(index scores)) of each indexer, where p is what
    its layer's attention gives to the entries, averaged over heads and divided by its sum.

    p and the indexer's inputs are detached, and the scores are those of the indexer's own scorer, with gradients.
    Use as a context around training; nothing happens in models without such indexers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.attentions: list[Any] = [m for m in model.modules() if _selects(m)]
        self.top_k = getattr(model.config, "index_topk", 0)
        self._scores: dict[nn.Module, torch.Tensor] = {}
        self._terms: list[torch.Tensor] = []
        self._handles: list[Any] = []

    def __enter__(self) -> CompressedIndexerAlignment:
        for attention in self.attentions:
            indexer = attention.compressor.indexer
            self._handles.append(indexer.register_forward_pre_hook(self._detach))
            self._handles.append(indexer.scorer.register_forward_hook(partial(self._keep, indexer)))
            self._handles.append(attention.register_forward_hook(partial(self._compare, indexer)))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._select(self.top_k)

    def begin(self, progress: float) -> None:
        """Before a step at `progress` (0 to 1) of the run: dense at first, then the config's number of entries."""
        self._terms.clear()
        self._select(self.top_k if progress >= DENSE_UNTIL else 1 << 30)

    def loss(self) -> torch.Tensor:
        """The sum over layers of the last forward pass, in nats; 0 for models without indexers."""
        return torch.stack(self._terms).sum() if self._terms else torch.zeros(())

    def _select(self, top_k: int) -> None:
        for attention in self.attentions:
            attention.compressor.indexer.index_topk = top_k

    def _detach(self, indexer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_states, query_residual, *rest = arguments
        return hidden_states.detach(), query_residual.detach(), *rest

    def _keep(self, indexer: nn.Module, scorer: nn.Module, arguments: Any, scores: torch.Tensor) -> None:
        self._scores[indexer] = scores

    def _compare(self, indexer: nn.Module, attention: nn.Module, arguments: Any, output: tuple[Any, ...]) -> None:
        scores = self._scores.pop(indexer)
        attended = output[1].detach().mean(dim=1)[..., -scores.shape[-1] :]
        total = attended.sum(dim=-1, keepdim=True)
        wanted = attended / total.clamp_min(1e-30)
        seen = attended > 0
        log_selected = F.log_softmax(scores.masked_fill(~seen, -1e30), dim=-1)
        difference = wanted * (wanted.clamp_min(1e-30).log() - log_selected.masked_fill(~seen, 0.0))
        rows = (total > 0).sum().clamp_min(1)
        self._terms.append(difference.sum() / rows)


def _selects(attention: nn.Module) -> bool:
    compressor = getattr(attention, "compressor", None)
    return isinstance(getattr(compressor, "indexer", None), nn.Module)
