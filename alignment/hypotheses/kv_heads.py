"""Query heads served by the wrong key and value heads, or outputs gathered in another order of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import attentions
from porter.alignment.hypotheses.surgery import INTERFACES, names_global, wrap_attention
from porter.alignment.hypotheses.trial import Change, Trial, TrialHypothesis


def _query_heads(path: str, order: torch.Tensor) -> Change:
    """Serve query head h by the keys and values of head order[h]: move the queries there and the outputs back."""
    inverse = order.argsort()

    def wrap(attend: Callable[..., Any]) -> Callable[..., Any]:
        def permuted(module: nn.Module, query: torch.Tensor, *rest: Any, **options: Any) -> Any:
            output, weights = attend(module, query.index_select(1, inverse), *rest, **options)
            return output.index_select(2, order), None if weights is None else weights.index_select(1, order)

        return permuted

    return lambda module: wrap_attention(module.get_submodule(path), wrap)


def _output_heads(path: str, order: torch.Tensor) -> Change:
    """Hand the heads to the output projection in another order."""

    def wrap(attend: Callable[..., Any]) -> Callable[..., Any]:
        def permuted(*given: Any, **options: Any) -> Any:
            output, weights = attend(*given, **options)
            return output.index_select(2, order), weights

        return permuted

    return lambda module: wrap_attention(module.get_submodule(path), wrap)


def _trials(drift: Drift) -> Iterator[Trial]:
    for path, attention in attentions(drift.source_module, drift.forced):
        config = getattr(attention, "config", None)
        heads = int(getattr(config, "num_attention_heads", 0))
        kv_heads = int(getattr(config, "num_key_value_heads", 0) or heads)
        if heads < 2 or not names_global(attention, INTERFACES):
            continue
        if 1 < kv_heads < heads:
            served = torch.arange(heads) % kv_heads
            order = served * (heads // kv_heads) + torch.arange(heads) // kv_heads
            says = (
                f"Query head h reads key/value head h % {kv_heads} where the source reads h // {heads // kv_heads}: "
                "repeat each key/value head in place, do not tile them"
            )
            yield Trial("kv-head-order", says, _query_heads(path, order), part=path)
        for words, order in _orders(heads):
            says = f"The heads reach o_proj {words}: gather them in the source's order"
            yield Trial("head-permutation", says, _output_heads(path, order), part=path)


def _orders(heads: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Orders in which sharding and fused kernels leave heads."""
    index = torch.arange(heads)
    yield "in reverse order", index.flip(0)
    for ranks in (r for r in (2, 4, 8) if heads % r == 0 and heads > r):
        yield f"interleaved over {ranks} ranks", index.view(ranks, -1).t().reshape(-1)
        yield f"grouped by {ranks} ranks that own every {ranks}th head", index.view(-1, ranks).t().reshape(-1)
    if heads % 2 == 0:
        yield "with its halves exchanged", index.roll(heads // 2)


HYPOTHESIS = TrialHypothesis(("kv-head-order", "head-permutation"), _trials)
