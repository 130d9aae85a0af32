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
    (None where not quantized); `roundable` is the dtype that its values may have been rounded to on the way.
    """

    name: str
    source: str
    owner: str
    reference: Tensor | None
    candidate: Tensor | None
    step: Tensor | None
    dtype: torch.dtype
    is_parameter: bool
    roundable: torch.dtype
    why: str = ""


@dataclass(frozen=True)
class JudgedWeight:
    """A weight with its row of the report."""

    weight: Weight
    row: WeightRow


@dataclass(frozen=True)
class WeightPairing:
    """Candidate and source tensors side by side.

    `compute` and `recorded` are the dtypes that candidate and golden run in: a candidate in a coarser dtype may have
    rounded everything to it, one in the golden's own dtype nothing.
    """

    candidate: nn.Module
    source: nn.Module
    correspondence: Correspondence
    compute: torch.dtype
    recorded: torch.dtype

    def __iter__(self) -> Iterator[Weight]:
        """Every parameter and buffer of the candidate, part by part; one at a time."""
        model = self.source
        known = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        parameters = dict(self.candidate.named_parameters(remove_duplicate=False))
        everything = parameters | dict(self.candidate.named_buffers(remove_duplicate=False))
        lasting = set(self.candidate.state_dict())
        for name, tensor in everything.items():
            if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in everything:
                continue
            scale = everything.get(f"{name}{SCALE_SUFFIX}")
            roundable = self._roundable(tensor.dtype, name in lasting)
            yield from self._parts(name, tensor, scale, known, name in parameters, roundable)

    def _roundable(self, stored: torch.dtype, lasting: bool) -> torch.dtype:
        """Tables computed at start are not in a checkpoint: whoever casts the model rounds them."""
        if not lasting or stored == torch.float16:
            return stored
        return _coarser(stored, self.compute) if _eps(self.compute) > _eps(self.recorded) else torch.float64

    def _parts(
        self,
        name: str,
        tensor: Tensor,
        scale: Tensor | None,
        known: dict[str, Tensor],
        is_parameter: bool,
        roundable: torch.dtype,
    ) -> Iterator[Weight]:
        sources = self.correspondence.source_of(name)
        owner = name.rpartition(".")[0]
        missing = [source for source in sources if source not in known]
        if missing:
            if is_parameter:
                why, listed = f"the source has no {missing[0]}", ", ".join(sources)
                yield Weight(name, listed, owner, None, None, None, tensor.dtype, True, roundable, why)
            return
        values, step, why = dequantized(tensor, scale)
        sizes = [int(known[source].shape[0]) if known[source].dim() else 1 for source in sources]
        if len(sources) > 1 and sum(sizes) != tensor.shape[0]:
            values, why = None, why or f"{tensor.shape[0]} rows do not split into {sizes}"
        for index, source in enumerate(sources):
            rows = slice(sum(sizes[:index]), sum(sizes[: index + 1])) if len(sources) > 1 else slice(None)
            part = values[rows] if values is not None and values.dim() else values
            part_step = None if step is None else step[rows]
            reference = known[source].detach()
            yield Weight(name, source, owner, reference, part, part_step, tensor.dtype, is_parameter, roundable, why)


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return one if _eps(one) >= _eps(other) else other


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
    expected = rounding(weight.roundable, reference.dtype, weight.is_parameter)
    if error > expected:
        return _judged(weight, error, expected, "more than rounding to the dtype costs")
    single = _worst_element(candidate, reference)
    if single > expected * 1.001:
        return _judged(weight, single, expected, "single elements differ by more than rounding (their relative error)")
    return _judged(weight, error, expected, "")


def rounding(roundable: torch.dtype, reference: torch.dtype, is_parameter: bool) -> float:
    """The relative error that rounding `reference` values to `roundable` causes, per element and so in L2.

    Half the spacing of floating-point numbers next to 1 where that dtype is coarser; else a copy is exact, up to the
    last bits of float32 where values may have been computed.
    """
    if not reference.is_floating_point:
        return 0.0
    if _eps(roundable) > _eps(reference) or roundable == torch.float16:
        return _eps(roundable) / 2
    computed = COPY if is_parameter else COMPUTED
    return computed if _eps(reference) <= COPY else 0.0


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
    elif weight.roundable != torch.float64 and weight.reference.is_floating_point():
        value = weight.reference.to(weight.roundable).to(weight.reference.dtype)
    else:
        value = weight.reference
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        owner._buffers[leaf] = value
