"""Which modules of a ported model a scheme stores in fewer bits."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from porter.errors import PorterError
from porter.kernels.dispatch import op_calls
from porter.models.port import PortedSource
from porter.quantization import LEFT, STATIC, Scheme

LATENT_ATTENTION = ("mla_attention", "sparse_mla_attention")
"""Ops of attention over a latent, whose module holds the projections around it."""


def quantized_modules(source: PortedSource, config: Any, scheme: Scheme) -> dict[str, str]:
    """Module name -> scheme for every linear and expert stack, and in bf16 for embeddings.

    Weights that an Op reads itself (routers, kv_b_proj) and linears that their rewrite marks stay as they are. In int8
    the output embedding takes w8a16: its input feeds the logits directly, and its weight is the largest matrix of a
    small model. Raises PorterError for a scheme of latent attention or of int4 experts, and a model without.
    """
    with torch.device("meta"):
        model = source.model_class()(copy.deepcopy(config))
    result = modules_of_scheme(model, source.load().Linear, scheme)
    for wanted, needed in ((scheme.attention, "latent attention"), (scheme.experts, "routed experts of that form")):
        if wanted in (STATIC, "w4a8") and wanted not in result.values():
            raise PorterError(f"--scheme {scheme.name}: the model has no {needed}; choose w8a8 or w8a16")
    return result


def modules_of_scheme(model: nn.Module, linear: type[nn.Module], scheme: Scheme) -> dict[str, str]:
    """`quantized_modules` of a model whose linears are of the class `linear`."""
    result = {}
    # A prediction layer is no model of transformers: it has no head of its own, and calibration does not run it.
    whole = isinstance(model, PreTrainedModel)
    last = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    attentions = {site.rpartition(".")[0] for site, call in op_calls(model) if call.name in LATENT_ATTENTION}
    for name, module in model.named_modules():
        if isinstance(module, linear):
            if getattr(module, "keeps_dtype", False):
                continue
            chosen = scheme.head if module is last else _linear_scheme(name, attentions, scheme)
            result[name] = "w8a8" if chosen == STATIC and not whole else chosen
        elif {"gate_up_proj", "down_proj"} <= dict(module.named_parameters(recurse=False)).keys():
            result[name] = _experts_scheme(module, scheme)
        elif type(module) is nn.Embedding and scheme.weight_dtype != torch.int8:
            result[name] = scheme.name
    return {name: chosen for name, chosen in result.items() if chosen != LEFT}


def _linear_scheme(name: str, attentions: set[str], scheme: Scheme) -> str:
    """That of latent attention for its own projections; what lies deeper within it (an indexer) chooses keys, and is
    left alone where attention has a scheme of its own."""
    if not scheme.attention:
        return scheme.linears
    parent = name.rpartition(".")[0]
    if parent in attentions:
        return scheme.attention
    return LEFT if any(parent.startswith(f"{attention}.") for attention in attentions) else scheme.linears


def _experts_scheme(module: nn.Module, scheme: Scheme) -> str:
    """Clamped experts have no product over int4."""
    clamped = module.__dict__["experts"].variant.startswith("clamped")
    return "w8a8" if clamped and scheme.experts == "w4a8" else scheme.experts
