"""Judging a weight: how far the candidate's values may be from the source's, and how far they are."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from porter.alignment.quantized_weight import quantization_error
from porter.alignment.report import WeightRow
from porter.alignment.streaming import stream_of
from porter.alignment.weight import JudgedWeight, Weight

# Of copies that need not round. Tables computed at start (buffers) may be evaluated in another order.
COPY, COMPUTED = 2.0**-23, 2.0**-21
BLOCK = 1 << 20
"""Elements compared at a time: what the comparison needs besides the tensors themselves."""
COUNTED = 1 << 20
"""Elements of the longest vector whose distinct values are counted."""


def judge(weight: Weight) -> JudgedWeight:
    """The weight's error and whether what the candidate stores accounts for it.

    A floating dtype may round every element once: unit roundoff, 2^-8 for bfloat16. A quantizer may err as
    round-to-nearest with the best steps of its grid does, with some slack.
    """
    values = weight.values()
    reference, candidate = values.reference, values.candidate
    if reference is None or candidate is None:
        why = values.why or weight.why
        if values.wrong:
            return JudgedWeight(weight, WeightRow(weight.name, weight.source, math.inf, 0.0, "drift", why))
        return JudgedWeight(weight, WeightRow(weight.name, weight.source, None, None, "skipped", why))
    if reference.shape != candidate.shape:
        why = f"shape {tuple(candidate.shape)} where the source has {tuple(reference.shape)}"
        return JudgedWeight(weight, WeightRow(weight.name, weight.source, math.inf, 0.0, "drift", why))
    error, single = distance(candidate, reference)
    if values.grid is not None:
        expected = quantization_error(reference, values.grid, weight.dtype, values.levels)
        return _judged(weight, error, expected, "" if error <= expected else "more than its quantization costs")
    expected = rounding(weight.roundable, reference.dtype, weight.is_parameter)
    if not error <= expected:
        return _judged(weight, error, expected, "more than rounding to the dtype costs")
    if single > expected * 1.001:
        return _judged(weight, single, expected, "single elements differ by more than rounding (their relative error)")
    blurred = spread_lost(candidate, reference) if weight.discerning else None
    if blurred is not None and blurred > expected:
        return _judged(weight, blurred, expected, _narrowed(candidate, reference))
    return _judged(weight, error, expected, "", _other_format(weight, reference))


def distance(candidate: Tensor, reference: Tensor) -> tuple[float, float]:
    """(relative L2 error, largest error of an element relative to its own size), block by block in float64.

    An element smaller than the dtypes' smallest normal number counts as if it had that size. Infinite where a value is
    not finite and the other side's is not the same.
    """
    same_kind = candidate.dtype == reference.dtype and candidate.device == reference.device
    if not reference.numel() or (same_kind and torch.equal(candidate, reference)):
        return 0.0, 0.0
    floats = [t.dtype for t in (candidate, reference) if t.is_floating_point()]
    smallest = max((torch.finfo(dtype).tiny for dtype in floats), default=1.0)
    squared = total = single = 0.0
    for mine, theirs in _blocks(candidate, reference):
        difference = torch.where(mine == theirs, 0.0, mine - theirs).abs()
        if not bool(difference.isfinite().all()):
            return math.inf, math.inf
        squared += float(difference.square().sum())
        total += float(theirs.nan_to_num(0.0, 0.0, 0.0).square().sum())
        single = max(single, float((difference / theirs.abs().clamp_min(smallest)).max()))
    if squared == 0.0:
        return 0.0, 0.0
    return (math.sqrt(squared / total) if total else math.inf), single


def _blocks(candidate: Tensor, reference: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    columns = max(1, math.prod(reference.shape[1:]))
    step = max(1, BLOCK // columns)
    if reference.dim() == 0:
        candidate, reference = candidate.reshape(1), reference.reshape(1)
    for start in range(0, reference.shape[0], step):
        rows = slice(start, start + step)
        theirs = reference[rows].detach().to(torch.float64)
        yield candidate[rows].detach().to(theirs.device, torch.float64), theirs


def spread_lost(candidate: Tensor, reference: Tensor) -> float:
    """The error relative to how far the values lie apart, not to their size."""
    theirs = reference.to(torch.float64)
    spread = float((theirs - theirs.mean()).norm())
    difference = float((candidate.to(theirs.device, torch.float64) - theirs).norm())
    return difference / spread if spread else (math.inf if difference else 0.0)


def _narrowed(candidate: Tensor, reference: Tensor) -> str:
    mine, theirs = (int(tensor.unique().numel()) for tensor in (candidate[:COUNTED], reference[:COUNTED]))
    return f"rounded away: {mine} distinct values where the source has {theirs} (the error is relative to their spread)"


def _other_format(weight: Weight, reference: Tensor) -> str:
    """What to say of a float16 source in bfloat16, which keeps 8 bits of 11: allowed, but not silently."""
    if reference.dtype == torch.float16 and weight.roundable == torch.bfloat16 == weight.dtype:
        return "float16 in the source, bfloat16 here: 3 bits fewer"
    return ""


def rounding(roundable: torch.dtype, reference: torch.dtype, is_parameter: bool) -> float:
    """The relative error that rounding `reference` values to `roundable` causes, per element and so in L2.

    Half the spacing of floating-point numbers next to 1 where that dtype is coarser; else a copy is exact, up to the
    last bits of float32 where values may have been computed.
    """
    if not reference.is_floating_point:
        return 0.0
    if eps_of(roundable) > eps_of(reference) or roundable == torch.float16:
        return eps_of(roundable) / 2
    computed = COPY if is_parameter else COMPUTED
    return computed if eps_of(reference) <= COPY else 0.0


def _judged(weight: Weight, error: float, expected: float, why: str, note: str = "") -> JudgedWeight:
    status = "drift" if why else "ok"
    return JudgedWeight(weight, WeightRow(weight.name, weight.source, error, expected, status, why or note))


def adopt(source: nn.Module, judged: JudgedWeight) -> None:
    """Make the source the oracle of this candidate: what its dtype or scheme explains is taken from the candidate.

    A weight in order is replaced by the candidate's value, one that is not by the source's rounded to the candidate's
    dtype, so that a replay sees mathematics and wrong weights but not expected rounding. A streamed source takes the
    value when it next reads that weight.
    """
    weight = judged.weight
    if weight.read is None or judged.row.status == "skipped":
        return
    stream = stream_of(source)
    if stream is not None and weight.source in stream.placeholders:
        taken = torch.float32 if weight.quantized else weight.dtype
        dtype = taken if judged.row.status == "ok" else _beside(weight, stream.placeholders[weight.source].dtype)
        stream.adopt(weight.source, dtype, lambda: _adopted(judged))
        return
    path, _, leaf = weight.source.rpartition(".")
    owner = source.get_submodule(path)
    value = _adopted(judged)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[leaf] = value


def _adopted(judged: JudgedWeight) -> Tensor:
    weight, values = judged.weight, judged.weight.values()
    reference, candidate = values.reference, values.candidate
    assert reference is not None, "skipped weights are not adopted"
    if judged.row.status == "ok" and candidate is not None:
        return candidate.detach().clone().to(reference.device)
    if weight.roundable != torch.float64 and reference.is_floating_point():
        reference = reference.to(weight.roundable).to(reference.dtype)
    return reference.to(_beside(weight, reference.dtype))


def _beside(weight: Weight, reference: torch.dtype) -> torch.dtype:
    """The dtype of a source's weight among those that were taken from a candidate of a wider one: theirs."""
    widens = weight.dtype.is_floating_point and reference.is_floating_point and eps_of(weight.dtype) < eps_of(reference)
    return weight.dtype if widens else reference


def eps_of(dtype: torch.dtype) -> float:
    """Spacing of the dtype's values at 1; 0 for integers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
