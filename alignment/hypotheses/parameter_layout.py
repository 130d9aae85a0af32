"""Parameters whose values are all there but in another place: transposed, permuted, exchanged between tensors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.nibble_order import is_packing
from porter.alignment.hypotheses.permutation import classify, matching_order
from porter.alignment.hypotheses.relation import Finding, Parameter, ParameterHypothesis, relative
from porter.alignment.observation import cosine

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
        if order is None or (source.dim() > 1 and is_packing(order, dim - source.dim())):
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
    for name, other in chain(fused.items(), drift.elsewhere.items()):
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


ALIKE = 0.5
"""Relative error below which two parameters are two states of one."""
UNRELATED, UNRELATED_FROM = 0.1, 256
"""Cosine below which two parameters of at least that many elements have nothing in common."""


def _parts(drift: Drift, parameter: Parameter) -> Iterator[Finding]:
    """Only some of the slices are the source's: which experts, rows or columns are not."""
    source, candidate = parameter.source, parameter.candidate
    for dim in range(source.dim() if source.dim() > 1 else 0):
        right = (source == candidate).movedim(dim, 0).flatten(1).all(-1)
        if not bool(right.any()) or bool(right.all()):
            continue
        wrong = (~right).nonzero().flatten().tolist()
        spans = wrong[-1] - wrong[0] + 1 == len(wrong) and len(wrong) > 1
        places = f"{wrong[0]} to {wrong[-1]}" if spans else ", ".join(map(str, wrong[:6]))
        zeros = not bool(candidate.movedim(dim, 0)[wrong].any())
        what = "are zero: they were never loaded" if zeros else "are not the source's: load them again"
        mended = candidate.movedim(dim, 0).clone()
        mended[wrong] = source.movedim(dim, 0)[wrong]
        says = f"Only {slice_words(source, dim)} {places} of {parameter.name} ({len(wrong)} of {len(right)}) {what}"
        yield Finding("weight-stale", relative(mended.movedim(0, dim), source), says)
        return
    tied = [name for name, other in drift.elsewhere.items() if _ties(parameter.name, name, source, other)]
    if tied:
        says = f"The source ties {parameter.name} to {tied[0]}, here it holds values of its own: tie_word_embeddings"
        yield Finding("tied-embedding", 0.0, says)
    elif source.numel() > UNRELATED_FROM and abs(cosine(candidate, source) or 0.0) < UNRELATED:
        says = f"{parameter.name} has nothing in common with the source's: it was never loaded, or from another model"
        yield Finding("weight-stale", 0.0, says)
    elif source.numel() > UNRELATED_FROM and not parameter.quantized and _strays(source, candidate):
        says = f"{parameter.name} is near the source's but not it, in no pattern: it is from another checkpoint"
        yield Finding("weight-stale", 0.0, says)


def _strays(source: torch.Tensor, candidate: torch.Tensor) -> bool:
    """Whether the two are alike, and what is between them has nothing to do with the values or their size."""
    error = candidate - source
    tied_to_value = abs(cosine(error, source) or 0.0)
    sizes, errors = source.abs(), error.abs()
    tied_to_size = abs(cosine(errors - errors.mean(), sizes - sizes.mean()) or 0.0)
    return float(error.norm()) < ALIKE * float(source.norm()) and max(tied_to_value, tied_to_size) < UNRELATED


def _ties(name: str, other_name: str, source: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the source holds one tensor under both names, embedding and head."""
    ends = {"lm_head.weight", "embed_tokens.weight"}
    pair = {".".join(each.split(".")[-2:]) for each in (name, other_name)}
    return pair == ends and other.shape == source.shape and relative(other, source) == 0.0


def slice_words(source: torch.Tensor, dim: int) -> str:
    """What a slice of the dimension is called."""
    return "experts" if source.dim() == 3 and dim == 0 else "rows" if dim == source.dim() - 2 else "columns"


TRANSPOSED = ParameterHypothesis(("weight-transposed",), _transposed)
PERMUTED = ParameterHypothesis(
    ("weight-permuted", "head-permutation", "kv-head-order", "expert-permutation", "rope-style", "gate-up-swapped"),
    _permuted,
)
EXCHANGED_PARAMETERS = ParameterHypothesis(("gate-up-swapped", "tied-embedding", "weight-stale"), _exchanged)
PARTS = ParameterHypothesis(("weight-stale", "tied-embedding"), _parts)
STALE = ParameterHypothesis(("weight-stale",), _stale)
