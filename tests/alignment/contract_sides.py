"""A golden beside its model, and what the lint finds of a candidate."""

from __future__ import annotations

import types
from typing import Any

import torch
from planted import bfloat16
from torch import nn

from porter.alignment.contract_lint.lint import lint
from porter.alignment.pairing import module_names, pair_modules
from porter.alignment.report import LintFinding
from porter.correspondence import Correspondence
from porter.golden.store import Golden

Sides = tuple[Any, Golden]


def kept_wide(model: Any) -> Any:
    """A copy in bfloat16 as transformers loads it: what is pinned to float32 stays float32."""
    copied = bfloat16(model)
    for (name, tensor), (_, exact) in zip(copied.named_buffers(), model.named_buffers(), strict=True):
        owner, _, leaf = name.rpartition(".")
        if "inv_freq" in leaf or "bias" in leaf:
            copied.get_submodule(owner)._buffers[leaf] = exact.clone().to(torch.float32)
            assert tensor.dtype == torch.bfloat16
    for name, parameter in list(copied.named_parameters()):
        if name.endswith("gate.weight"):
            exact = model.get_parameter(name)
            copied.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(exact.clone(), requires_grad=False)
            assert parameter.dtype == torch.bfloat16
    return copied


def found(golden: Golden, source: Any, candidate: nn.Module) -> list[LintFinding]:
    return lint(golden, source, candidate, pair_modules(golden, module_names(candidate), Correspondence()))


def bound(module: nn.Module, function: Any) -> None:
    module.forward = types.MethodType(function, module)  # type: ignore[method-assign]
