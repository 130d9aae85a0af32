"""Query heads served by the wrong key and value heads, or outputs gathered in another order of heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import attentions
from porter.alignment.hypotheses.surgery import set_parameter
from porter.alignment.hypotheses.trial import Change, Trial, TrialHypothesis


def reorder(tensor: torch.Tensor, order: torch.Tensor, dim: int) -> torch.Tensor:
    """The blocks along `dim`, one per entry of `order`, put in that order."""
    blocks = tensor.unflatten(dim, (len(order), -1))
    return blocks.index_select(dim % tensor.dim(), order).reshape(tensor.shape)


def _permute_query_heads(path: str, order: torch.Tensor) -> Change:
    """Serve query head i by the keys and values of head order[i]: permute what comes in, undo it on the way out."""
    inverse = order.argsort()

    def change(module: nn.Module) -> None:
        attention = module.get_submodule(path)
        for name, dim in (("q_proj.weight", 0), ("q_proj.bias", 0), ("o_proj.weight", 1)):
            value = _parameter(attention, name)
            if value is not None:
                set_parameter(attention, name, reorder(value, inverse, dim))

    return change


def _permute_outputs(path: str, order: torch.Tensor) -> Change:
    def change(module: nn.Module) -> None:
        attention = module.get_submodule(path)
        weight = _parameter(attention, "o_proj.weight")
        assert weight is not None, "an attention has an output projection"
        set_parameter(attention, "o_proj.weight", reorder(weight, order, 1))

    return change


def _parameter(module: nn.Module, name: str) -> torch.Tensor | None:
    owner, _, leaf = name.rpartition(".")
    return module.get_submodule(owner)._parameters.get(leaf) if owner in module._modules else None


def _trials(drift: Drift) -> Iterator[Trial]:
    for path, attention in attentions(drift.source_module):
        config = getattr(attention, "config", None)
        heads = int(getattr(config, "num_attention_heads", 0))
        kv_heads = int(getattr(config, "num_key_value_heads", 0) or heads)
        if heads < 2 or "kv_b_proj" in attention._modules:
            continue
        if 1 < kv_heads < heads:
            served = torch.arange(heads) % kv_heads
            order = served * (heads // kv_heads) + torch.arange(heads) // kv_heads
            says = (
                f"Query head h reads key/value head h % {kv_heads} where the source reads h // {heads // kv_heads}: "
                "repeat each key/value head in place, do not tile them"
            )
            yield Trial("kv-head-order", says, _permute_query_heads(path, order), part=path)
        for words, order in _orders(heads):
            says = f"The heads reach o_proj {words}: gather them in the source's order"
            yield Trial("head-permutation", says, _permute_outputs(path, order), part=path)


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
