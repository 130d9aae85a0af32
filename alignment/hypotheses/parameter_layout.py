"""Parameters whose values are all there but in another place: transposed, permuted, exchanged between tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.permutation import classify, matching_order
from porter.alignment.hypotheses.relation import Finding, Parameter, ParameterHypothesis, relative

SAMPLE = 4096


def _transposed(drift: Drift, parameter: Parameter) -> Iterator[Finding]:
    source, candidate = parameter.source, parameter.candidate
    if source.dim() < 2 or 1 in source.shape[-2:]:
        return
    turned = source.transpose(-1, -2)
    says = f"{parameter.name} is stored transposed: transpose it on loading (this kernel's layout is not the source's)"
    if turned.shape == source.shape:
        yield Finding("weight-transposed", relative(turned, candidate), says)
    else:
        rows, columns = source.shape[-2:]
        reshaped = turned.reshape(source.shape)
        says = f"{parameter.name} is the [{columns}, {rows}] transpose under the shape of the source: transpose it"
        yield Finding("weight-transposed", relative(reshaped, candidate), says)
        back = source.reshape(*source.shape[:-2], columns, rows).transpose(-1, -2)
        yield Finding("weight-transposed", relative(back, candidate), says)


def _permuted(drift: Drift, parameter: Parameter) -> Iterator[Finding]:
    source, candidate = parameter.source, parameter.candidate
    dims = range(source.dim()) if source.dim() > 1 or source.numel() > 1 else range(0)
    for dim in dims:
        order = matching_order(source, candidate, dim)
        if order is None:
            continue
        after = relative(source.index_select(dim, order), candidate)
        kind, words = classify(drift, parameter.name, order, dim, source.dim())
        yield Finding(kind, after, f"{parameter.name}: {words}")


EXCHANGED = {
    frozenset({"gate_proj", "up_proj"}): ("gate-up-swapped", "load gate_proj into the first half of gate_up_proj"),
}


def _exchanged(drift: Drift, parameter: Parameter) -> Iterator[Finding]:
    """The candidate's parameter is another one of the source's."""
    fused = {name: source for name, (source, _) in drift.weights.items() if name != parameter.key}
    for name, other in (*fused.items(), *drift.elsewhere.items()):
        if other.shape != parameter.candidate.shape or not _alike(other, parameter.candidate):
            continue
        after = relative(other, parameter.candidate)
        leaves = frozenset({_leaf(name), _leaf(parameter.name)})
        if leaves in EXCHANGED:
            kind, fix = EXCHANGED[leaves]
            yield Finding(kind, after, f"{parameter.name} holds {name}: {fix}")
        elif "embed_tokens" in name or "lm_head" in name:
            says = (
                f"{parameter.name} holds {name}: the two are tied here and are not in the source (tie_word_embeddings)"
            )
            yield Finding("tied-embedding", after, says)
        else:
            yield Finding("weight-stale", after, f"{parameter.name} holds the source's {name}: load {parameter.name}")


def _alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the first values are near enough for a comparison of the whole to be worth its time."""
    return relative(tensor.flatten()[:SAMPLE], other.flatten()[:SAMPLE]) < 0.5


def _leaf(name: str) -> str:
    return name.split(".")[-2] if "." in name else name


def _stale(drift: Drift, parameter: Parameter) -> Iterator[Finding]:
    source, candidate = parameter.source, parameter.candidate
    if parameter.name.endswith("bias"):
        return
    if not candidate.any() and source.any():
        yield Finding("weight-stale", 0.0, f"{parameter.name} is all zeros: it was never loaded")
    elif candidate.numel() > 8 and bool((candidate == candidate.flatten()[0]).all()):
        value = float(candidate.flatten()[0])
        yield Finding("weight-stale", 0.0, f"{parameter.name} is {value:.4g} everywhere: it was never loaded")


TRANSPOSED = ParameterHypothesis(("weight-transposed",), _transposed)
PERMUTED = ParameterHypothesis(
    ("weight-permuted", "head-permutation", "kv-head-order", "expert-permutation", "rope-style", "gate-up-swapped"),
    _permuted,
)
EXCHANGED_PARAMETERS = ParameterHypothesis(("gate-up-swapped", "tied-embedding", "weight-stale"), _exchanged)
STALE = ParameterHypothesis(("weight-stale",), _stale)
