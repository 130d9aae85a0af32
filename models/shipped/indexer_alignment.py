"""Trains lightning indexers to select what the attention attends to (DeepSeek-V3.2, arXiv 2512.02556, section 2.1)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

DENSE_UNTIL = 0.5
"""Progress of the run up to which attention is dense, so that indexers learn from all keys; sparse after it."""


class IndexerAlignment:
    """The loss KL(p || softmax(index scores)) of each indexer, where p is its layer's attention, averaged over heads.

    p and the indexer's inputs are detached, as in the paper: the language model's loss does not reach the indexer, nor
    this loss the rest of the model. While attention is sparse, both distributions are over the selected keys.
    Use as a context around training: attention is eager in it, since only that gives its weights.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.attentions = [m for m in model.modules() if hasattr(getattr(m, "indexer", None), "wq_b")]
        self.top_k = getattr(model.config, "index_topk", 0)
        self._calls: dict[nn.Module, tuple[torch.Tensor, ...]] = {}
        self._terms: list[torch.Tensor] = []
        self._handles: list[Any] = []
        self._before = model.config._attn_implementation

    def __enter__(self) -> IndexerAlignment:
        if not self.attentions:
            return self
        self.model.set_attn_implementation("eager")
        for attention in self.attentions:
            indexer: Any = attention.indexer
            self._handles.append(indexer.register_forward_pre_hook(self._keep))
            self._handles.append(attention.register_forward_hook(partial(self._compare, indexer)))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._select(self.top_k)
        self.model.set_attn_implementation(self._before)

    def begin(self, progress: float) -> None:
        """Before a step at `progress` (0 to 1) of the run: dense at first, then the config's number of keys."""
        self._terms.clear()
        self._select(self.top_k if progress >= DENSE_UNTIL else 1 << 30)

    def loss(self) -> torch.Tensor:
        """The sum over layers of the last forward pass, in nats; 0 for models without indexers."""
        return torch.stack(self._terms).sum() if self._terms else torch.zeros(())

    def _select(self, top_k: int) -> None:
        for attention in self.attentions:
            indexer: Any = attention.indexer
            indexer.index_topk = top_k

    def _keep(self, indexer: nn.Module, arguments: tuple[Any, ...]) -> None:
        hidden_states, query_residual, (cos, sin) = arguments[:3]
        self._calls[indexer] = tuple(t.detach() for t in (hidden_states, query_residual, cos, sin))

    def _compare(self, indexer: Any, attention: nn.Module, arguments: Any, output: tuple[Any, ...]) -> None:
        attended = output[1].detach().mean(dim=1)
        scores = index_scores(indexer, *self._calls.pop(indexer))
        log_selected = F.log_softmax(scores.masked_fill(attended == 0, -math.inf), dim=-1)
        difference = attended * (attended.clamp_min(1e-30).log() - log_selected.masked_fill(attended == 0, 0.0))
        self._terms.append(difference.sum(dim=-1).mean())


def index_scores(
    indexer: Any, hidden_states: torch.Tensor, query_residual: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """[B, S, S] scores of a prefill with gradients, as upstream's indexer has them before its mask and top-k."""
    shape = (*hidden_states.shape[:2], indexer.n_heads, indexer.head_dim)
    query = _rotated(indexer.wq_b(query_residual).view(shape), cos.unsqueeze(2), sin.unsqueeze(2))
    key = _rotated(indexer.k_norm(indexer.wk(hidden_states)), cos, sin)
    products = F.relu(torch.einsum("bshd,btd->bsht", query, key) * indexer.softmax_scale)
    return torch.einsum("bsh,bsht->bst", indexer.weights_proj(hidden_states) * indexer.n_heads**-0.5, products)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split rope on the first dimensions, as many as `cos` has; the rest pass."""
    rotary, passed = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = rotary.chunk(2, dim=-1)
    return torch.cat((rotary * cos + torch.cat((-second, first), dim=-1) * sin, passed), dim=-1)
