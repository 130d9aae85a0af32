"""Comparing parameters and buffers, unfused and dequantized through the Correspondence, before any forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from porter.alignment.quantized_weight import dequantized, quantization_error
from porter.alignment.report import WeightRow
from porter.alignment.streaming import Tensors, stream_of
from porter.correspondence import Correspondence

SCALE_SUFFIXES = ("_scale_inv", "_scale")
# Of copies that need not round. Tables computed at start (buffers) may be evaluated in another order.
COPY, COMPUTED = 2.0**-23, 2.0**-21
BLOCK = 1 << 20
"""Elements compared at a time: what the comparison needs besides the tensors themselves."""
COUNTED = 1 << 20
"""Elements of the longest vector whose distinct values are counted."""


@dataclass(frozen=True)
class Values:
    """A tensor of the source beside the candidate's, unfused and dequantized; None where it cannot be read.

    `step`: the quantizer's step, in a shape that broadcasts to the tensor's; `grid`: the rows and columns that share
    one step. None where the candidate's tensor is not quantized. `wrong`: `why` is a fault, not a limit of porter's.
    """

    reference: Tensor | None
    candidate: Tensor | None
    step: Tensor | None = None
    grid: tuple[int, int] | None = None
    why: str = ""
    wrong: bool = False


NOTHING = Values(None, None)


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of the source beside the candidate's values for it, read when they are asked for.

    `stored` is the dtype that the candidate keeps it in, `roundable` the one that its values may have been rounded to
    on the way. `discerning`: it tells things apart (a router's correction bias), so that what counts is its spread.
    """

    name: str
    source: str
    owner: str
    read: Callable[[], Values] | None
    dtype: torch.dtype
    is_parameter: bool
    roundable: torch.dtype
    quantized: bool = False
    discerning: bool = False
    why: str = ""

    def values(self) -> Values:
        """Both sides' values; nothing for a weight that is settled or cannot be compared."""
        return NOTHING if self.read is None else self.read()

    @property
    def reference(self) -> Tensor | None:
        """The source's values, read anew."""
        return self.values().reference

    @property
    def candidate(self) -> Tensor | None:
        """The candidate's values, read anew."""
        return self.values().candidate

    @property
    def step(self) -> Tensor | None:
        """The quantizer's step, read anew."""
        return self.values().step


@dataclass(frozen=True)
class JudgedWeight:
    """A weight with its row of the report."""

    weight: Weight
    row: WeightRow

    def settled(self) -> JudgedWeight:
        """Without the values where they are in order: those are in the two models."""
        return replace(self, weight=replace(self.weight, read=None)) if self.row.status == "ok" else self


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
    _known: Tensors = field(init=False, repr=False)
    _mine: Tensors = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_known", Tensors(self.source))
        object.__setattr__(self, "_mine", Tensors(self.candidate))

    def __iter__(self) -> Iterator[Weight]:
        """Every parameter and buffer of the candidate, part by part, in the order of the model."""
        parameters = {name for name, _ in self.candidate.named_parameters(remove_duplicate=False)}
        lasting = set(self.candidate.state_dict(keep_vars=True))
        scales = {base: name for name in self._mine for base in _scaled(name) if base in self._mine}
        for name, tensor in self._mine.shapes.items():
            if name not in scales.values():
                roundable = self._roundable(tensor.dtype, name in lasting)
                yield from self._parts(name, scales.get(name), name in parameters, roundable)
        yield from self._left_out()

    def _left_out(self) -> Iterator[Weight]:
        """The biases of the source that the candidate has nothing for, though it has the weights beside them: zeros."""
        covered = {source: name for name in self._mine.shapes for source in self.correspondence.source_of(name)}
        for source, shape in self._known.shapes.items():
            path, _, leaf = source.rpartition(".")
            beside = covered.get(f"{path}.weight")
            if leaf != "bias" or source in covered or beside is None:
                continue
            owner = beside.rpartition(".")[0]
            roundable = self._roundable(shape.dtype, True)
            read = partial(self._as_zeros, source)
            yield Weight(f"{owner}.bias", source, owner, read, shape.dtype, True, roundable)

    def _as_zeros(self, source: str) -> Values:
        known = self._known
        reference = known.own(source) if known.stream is not None else known[source]
        return Values(reference, torch.zeros_like(reference))

    def _roundable(self, stored: torch.dtype, lasting: bool) -> torch.dtype:
        """Tables computed at start are not in a checkpoint: whoever casts the model rounds them."""
        if not lasting or stored == torch.float16:
            return stored
        return _coarser(stored, self.compute) if _eps(self.compute) > _eps(self.recorded) else torch.float64

    def _parts(self, name: str, scale: str | None, is_parameter: bool, roundable: torch.dtype) -> Iterator[Weight]:
        sources = self.correspondence.source_of(name)
        stored = self._mine.shapes[name]
        weight = Weight(name, "", name.rpartition(".")[0], None, stored.dtype, is_parameter, roundable)
        missing = [source for source in sources if source not in self._known]
        if missing:
            if is_parameter:
                yield replace(weight, source=", ".join(sources), why=f"the source has no {missing[0]}")
            return
        shapes = [self._known.shapes[source].shape for source in sources]
        sizes = [int(shape[0]) if shape else 1 for shape in shapes]
        splits = len(sources) == 1 or sum(sizes) == stored.shape[0]
        for index, source in enumerate(sources):
            rows = slice(sum(sizes[:index]), sum(sizes[: index + 1])) if len(sources) > 1 else None
            why = "" if splits else f"{stored.shape[0]} rows do not split into {sizes}"
            read = self._reader(name, scale, source, rows, why)
            discerning = self._discerning(source)
            yield replace(weight, source=source, read=read, quantized=scale is not None, discerning=discerning)

    def _reader(self, name: str, scale: str | None, source: str, rows: slice | None, why: str) -> Callable[[], Values]:
        mine, known = self._mine, self._known
        # Of a model in memory the tensor itself: adopting replaces it there.
        own = partial(known.own, source) if known.stream is not None else partial(_same, known[source])

        def read() -> Values:
            reference = own()
            if why:
                return Values(reference, None, why=why)
            found = dequantized(mine[name].detach(), None if scale is None else mine[scale].detach())
            if found.values is None:
                return Values(reference, None, why=found.why, wrong=found.wrong)
            values, step = found.values, found.step
            if rows is not None:
                values, step = values[rows], None if step is None else step[rows]
            return Values(reference, values, step, found.grid)

        return read

    def _discerning(self, source: str) -> bool:
        """Whether the source's class insists on float32 for this vector whatever the model is cast to."""
        names: set[str] = set(getattr(self.source, "_keep_in_fp32_modules_strict", None) or ())
        return self._known.shapes[source].dim() == 1 and source.rpartition(".")[2] in names


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _scaled(name: str) -> list[str]:
    return [name.removesuffix(suffix) for suffix in SCALE_SUFFIXES if name.endswith(suffix)]


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return one if _eps(one) >= _eps(other) else other


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
        expected = quantization_error(reference, values.grid, weight.dtype)
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
    if _eps(roundable) > _eps(reference) or roundable == torch.float16:
        return _eps(roundable) / 2
    computed = COPY if is_parameter else COMPUTED
    return computed if _eps(reference) <= COPY else 0.0


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
    widens = weight.dtype.is_floating_point and reference.is_floating_point and _eps(weight.dtype) < _eps(reference)
    return weight.dtype if widens else reference
