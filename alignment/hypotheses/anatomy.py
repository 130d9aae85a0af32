"""Finding, by structure, the parts of a source module that known bugs live in."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

EPS_NAMES = ("variance_epsilon", "eps")
GATED = ("gate_proj", "up_proj", "down_proj")


NONE: frozenset[str] = frozenset()


def parts(module: nn.Module, forced: Collection[str] = NONE) -> Iterator[tuple[str, nn.Module]]:
    """(dotted name, module) of `module` itself and its descendants, not descending into a stack of layers.

    Descendants in `forced` are left out with all below them: what they do is judged in their own replay.
    """
    yield "", module
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList) or name in forced:
            continue
        inner = {each.removeprefix(f"{name}.") for each in forced if each.startswith(f"{name}.")}
        for below, descendant in parts(child, inner):
            yield f"{name}.{below}".rstrip("."), descendant


def eps_name(module: nn.Module) -> str | None:
    """The attribute that holds a norm's epsilon; None for a module that is no norm."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1:
        return None
    return next((name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)), None)


def norms(module: nn.Module, forced: Collection[str] = NONE) -> list[tuple[str, nn.Module]]:
    """RMS norms: a vector weight and an epsilon."""
    return [(name, part) for name, part in parts(module, forced) if eps_name(part) is not None]


def attentions(module: nn.Module, forced: Collection[str] = NONE) -> list[tuple[str, nn.Module]]:
    """Softmax attention: a `scaling` and an output projection."""
    return [
        (name, part)
        for name, part in parts(module, forced)
        if isinstance(getattr(part, "scaling", None), float) and "o_proj" in part._modules
    ]


def recurrences(module: nn.Module, forced: Collection[str] = NONE) -> list[tuple[str, nn.Module]]:
    """Linear attention: a short convolution and a decay A_log, a state in the cache for each."""
    return [
        (name, part)
        for name, part in parts(module, forced)
        if "conv1d" in part._modules and "A_log" in part._parameters
    ]


def experts(module: nn.Module, forced: Collection[str] = NONE) -> list[tuple[str, nn.Module]]:
    """Stacked experts: gate_up_proj [experts, 2 * intermediate, hidden] and down_proj."""
    return [(name, part) for name, part in parts(module, forced) if _three_dimensional(part, "gate_up_proj")]


def routers(module: nn.Module, forced: Collection[str] = NONE) -> list[tuple[str, nn.Module]]:
    """Top-k gates: a weight [experts, hidden] and a `top_k`."""
    return [
        (name, part)
        for name, part in parts(module, forced)
        if hasattr(part, "top_k") and isinstance(w := part._parameters.get("weight"), torch.Tensor) and w.dim() == 2
    ]


def activated(module: nn.Module, forced: Collection[str] = NONE) -> list[tuple[str, nn.Module]]:
    """Modules that own an activation function `act_fn`."""
    return [(name, part) for name, part in parts(module, forced) if callable(getattr(part, "act_fn", None))]


def branches(module: nn.Module) -> list[tuple[str, str]]:
    """(branch, the norm before it) of a pre-norm decoder layer, in execution order; empty for anything else."""
    pairs = (("self_attn", "input_layernorm"), ("linear_attn", "input_layernorm"), ("mlp", "post_attention_layernorm"))
    return [(branch, norm) for branch, norm in pairs if branch in module._modules and norm in module._modules]


def _three_dimensional(module: nn.Module, name: str) -> bool:
    parameter = module._parameters.get(name)
    return parameter is not None and parameter.dim() == 3
