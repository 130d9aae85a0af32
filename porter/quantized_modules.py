"""Which modules of a ported model a scheme stores in fewer bits."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from porter.models.port import PortedSource
from porter.quantization import Scheme


def quantized_modules(source: PortedSource, config: Any, scheme: Scheme) -> dict[str, str]:
    """Module name -> scheme for every linear and expert stack, and in bf16 for embeddings.

    Weights that an Op reads itself (routers, kv_b_proj) and linears that their rewrite marks stay as they are. In int8
    the output embedding takes w8a16: its input feeds the logits directly, and its weight is the largest matrix of a
    small model.
    """
    with torch.device("meta"):
        model = source.model_class()(copy.deepcopy(config))
    return modules_of_scheme(model, source.load().Linear, scheme)


def modules_of_scheme(model: nn.Module, linear: type[nn.Module], scheme: Scheme) -> dict[str, str]:
    """`quantized_modules` of a model whose linears are of the class `linear`."""
    result = {}
    head = "w8a16" if scheme.weight_dtype == torch.int8 else scheme.name
    # A prediction layer is no model of transformers and has no head of its own.
    last = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    for name, module in model.named_modules():
        if isinstance(module, linear):
            if getattr(module, "keeps_dtype", False):
                continue
            result[name] = head if module is last else scheme.name
        elif {"gate_up_proj", "down_proj"} <= dict(module.named_parameters(recurse=False)).keys():
            result[name] = scheme.name
        elif type(module) is nn.Embedding and scheme.weight_dtype != torch.int8:
            result[name] = scheme.name
    return result
