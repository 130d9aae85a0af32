"""Comparing parameters and buffers, unfused and dequantized through the Correspondence, before any forward."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from porter.alignment.observation import relative
from porter.alignment.report import WeightRow
from porter.correspondence import Correspondence

SCALE_SUFFIX = "_scale"
# Half a step of a uniform quantizer errs like a uniform variable: step / sqrt(12) in the mean. Methods that place the
# steps otherwise than round-to-nearest may lose more; twice the mean still leaves one bit of precision detectable.
QUANTIZATION_SLACK = 2.0
# Of copies that need not round. Tables computed at start (buffers) may be evaluated in another order.
COPY, COMPUTED = 2.0**-23, 2.0**-21
INT8_LEVELS = 127.0


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of the source beside the candidate's values for it.

    `candidate` is unfused and dequantized, None where it cannot be read; `step` is the quantizer's step per element
    (None where not quantized), `dtype` what the candidate stores.
    """

    name: str
    source: str
    owner: str
    reference: Tensor | None
    candidate: Tensor | None
    step: Tensor | None
    dtype: torch.dtype
    is_parameter: bool
    why: str = ""


@dataclass(frozen=True)
class JudgedWeight:
    """A weight with its row of the report."""

    weight: Weight
    row: WeightRow


def pair_weights(candidate: nn.Module, source: nn.Module, correspondence: Correspondence) -> Iterator[Weight]:
    """Every parameter and buffer of the candidate, part by part, with the source's; one at a time."""
    tensors = dict(source.named_parameters(remove_duplicate=False)) | dict(source.named_buffers(remove_duplicate=False))
    own = list(candidate.named_parameters(remove_duplicate=False))
    held = {name for name, _ in own}
    own += list(candidate.named_buffers(remove_duplicate=False))
    scales = {name for name, _ in own if name.endswith(SCALE_SUFFIX)}
    used = {name for name in scales if name.removesuffix(SCALE_SUFFIX) in dict(own)}
    everything = dict(own)
    for name, tensor in own:
        if name in used:
            continue
        scale = everything.get(f"{name}{SCALE_SUFFIX}")
        yield from _parts(name, tensor, scale, tensors, correspondence, name in held)


def _parts(
    name: str,
    tensor: Tensor,
    scale: Tensor | None,
    tensors: dict[str, Tensor],
    correspondence: Correspondence,
    is_parameter: bool,
) -> Iterator[Weight]:
    sources = correspondence.source_of(name)
    owner = name.rpartition(".")[0]
    missing = [source for source in sources if source not in tensors]
    if missing:
        if is_parameter:
            why = f"the source has no {missing[0]}"
            yield Weight(name, ", ".join(sources), owner, None, None, None, tensor.dtype, True, why)
        return
    values, step, why = dequantized(tensor, scale)
    sizes = [int(tensors[source].shape[0]) if tensors[source].dim() else 1 for source in sources]
    fits = len(sources) == 1 or sum(sizes) == tensor.shape[0]
    if values is None or not fits:
        why = why or f"{tensor.shape[0]} rows do not split into {sizes}"
    for index, source in enumerate(sources):
        part, part_step = values, step
        if fits and len(sources) > 1 and values is not None:
            start = sum(sizes[:index])
            part = values[start : start + sizes[index]]
            part_step = None if step is None else step[start : start + sizes[index]]
        readable = part if fits else None
        yield Weight(name, source, owner, tensors[source].detach(), readable, part_step, tensor.dtype, is_parameter, why)


def dequantized(tensor: Tensor, scale: Tensor | None) -> tuple[Tensor | None, Tensor | None, str]:
    """(values, step of the quantizer per row, why not): int8 times one scale per output row, floats as they are."""
    tensor = tensor.detach()
    if tensor.is_floating_point() and scale is None:
        return tensor, None, ""
    if tensor.dtype == torch.int8 and scale is not None and scale.shape == tensor.shape[: scale.dim()]:
        step = scale.detach().reshape(*scale.shape, *(1 for _ in range(tensor.dim() - scale.dim())))
        return tensor.to(torch.float32) * step, step, ""
    if not tensor.is_floating_point() and scale is None:
        return tensor, None, ""
    return None, None, f"{tensor.dtype} with a scale of shape {None if scale is None else tuple(scale.shape)}"


def judge(weight: Weight) -> JudgedWeight:
    """The weight's error and whether what the candidate stores accounts for it.

    A floating dtype may round every element once: unit roundoff, 2^-8 for bfloat16. A quantizer of step s
    may err by s / sqrt(12) in the mean.
    """
    reference, candidate = weight.reference, weight.candidate
    if reference is None or candidate is None:
        return JudgedWeight(weight, WeightRow(weight.name, weight.source, None, None, "skipped", weight.why))
    if reference.shape != candidate.shape:
        why = f"shape {tuple(candidate.shape)} where the source has {tuple(reference.shape)}"
        return JudgedWeight(weight, WeightRow(weight.name, weight.source, math.inf, 0.0, "drift", why))
    error = relative(candidate, reference)
    if weight.step is not None:
        expected = _quantization_error(weight, reference)
        return _judged(weight, error, expected, "" if error <= expected else "more than its quantization costs")
    expected = rounding(weight.dtype, reference.dtype, weight.is_parameter)
    if error > expected:
        return _judged(weight, error, expected, "more than rounding to its dtype costs")
    single = _worst_element(candidate, reference)
    if single > expected * 1.001:
        return _judged(weight, single, expected, "single elements differ by more than rounding (their relative error)")
    return _judged(weight, error, expected, "")


def rounding(stored: torch.dtype, reference: torch.dtype, is_parameter: bool) -> float:
    """The relative error that storing `reference` values as `stored` may cause, per element and so in L2.

    Half the spacing of floating-point numbers next to 1 where the dtype is coarser; of a wide enough one, nothing.
    """
    if not stored.is_floating_point or not reference.is_floating_point:
        return 0.0
    stored_eps, reference_eps = torch.finfo(stored).eps, torch.finfo(reference).eps
    if stored_eps > reference_eps:
        return stored_eps / 2
    return 0.0 if is_parameter and stored_eps > COPY else (COPY if is_parameter else max(COMPUTED, stored_eps / 2))


def _quantization_error(weight: Weight, reference: Tensor) -> float:
    """Expected relative L2 error of round-to-nearest with the best symmetric int8 scale per row, and its slack."""
    reference = reference.to(torch.float64)
    assert weight.step is not None, "only quantized weights come here"
    rows = weight.step.dim() - sum(size == 1 for size in weight.step.shape[-1:])
    columns = tuple(range(rows, reference.dim()))
    best = reference.abs().amax(dim=columns, keepdim=True) / INT8_LEVELS
    mean = float((best.square() / 12.0).expand_as(reference).sum().sqrt() / reference.norm().clamp_min(1e-300))
    return QUANTIZATION_SLACK * mean


def _worst_element(candidate: Tensor, reference: Tensor) -> float:
    """Largest error of an element relative to its own size, or to the dtype's smallest normal number if larger."""
    if not reference.is_floating_point() or not reference.numel():
        return 0.0
    smallest = max(torch.finfo(dtype).tiny for dtype in (candidate.dtype, reference.dtype))
    difference = (candidate.to(torch.float64) - reference.to(torch.float64)).abs()
    return float((difference / reference.to(torch.float64).abs().clamp_min(smallest)).max())


def _judged(weight: Weight, error: float, expected: float, why: str) -> JudgedWeight:
    status = "drift" if why else "ok"
    return JudgedWeight(weight, WeightRow(weight.name, weight.source, error, expected, status, why))


def adopt(source: nn.Module, judged: JudgedWeight) -> None:
    """Make the source the oracle of this candidate: what its dtype or scheme explains is taken from the candidate.

    A weight in order is replaced by the candidate's value, one that is not by the source's rounded to the candidate's
    dtype, so that a replay sees mathematics and wrong weights but not expected rounding.
    """
    weight = judged.weight
    if weight.candidate is None or weight.reference is None:
        return
    path, _, leaf = weight.source.rpartition(".")
    owner = source.get_submodule(path)
    if judged.row.status == "ok":
        value = weight.candidate.detach().clone().to(weight.reference.device)
    elif weight.dtype.is_floating_point and weight.reference.is_floating_point():
        value = weight.reference.to(weight.dtype)
    else:
        value = weight.reference
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[leaf] = value
