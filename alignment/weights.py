"""Comparing parameters and buffers, unfused and dequantized through the Correspondence, before any forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from porter.alignment.quantized_weight import contradiction, dequantized
from porter.alignment.streaming import Tensors
from porter.alignment.weight import Values, Weight
from porter.alignment.weight_judgement import eps_of
from porter.correspondence import Correspondence
from porter.recipe import STATIC_TENSORS

SCALE_SUFFIXES = ("_scale_inv", "_scale")
BIAS_SUFFIX = "_scale_bias"


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
    _declared: frozenset[str] = field(init=False, repr=False)
    """The modules of the candidate whose weights its config says are stored in fewer bits than it computes in."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_known", Tensors(self.source))
        object.__setattr__(self, "_mine", Tensors(self.candidate))
        section = getattr(getattr(self.candidate, "config", None), "porter", None) or {}
        object.__setattr__(self, "_declared", frozenset(section.get("quantized", ())))

    def __iter__(self) -> Iterator[Weight]:
        """Every parameter and buffer of the candidate, part by part, in the order of the model."""
        parameters = {name for name, _ in self.candidate.named_parameters(remove_duplicate=False)}
        lasting = set(self.candidate.state_dict(keep_vars=True))
        scales = {base: name for name in self._mine for base in _scaled(name) if base in self._mine}
        for name, tensor in self._mine.shapes.items():
            if name not in scales.values() and self._codes_of(name) is None:
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
        return _coarser(stored, self.compute) if eps_of(self.compute) > eps_of(self.recorded) else torch.float64

    def _parts(self, name: str, scale: str | None, is_parameter: bool, roundable: torch.dtype) -> Iterator[Weight]:
        sources = self.correspondence.source_of(name)
        stored = self._mine.shapes[name]
        weight = Weight(name, "", name.rpartition(".")[0], None, stored.dtype, is_parameter, roundable)
        if self._widened(name, stored.dtype):
            # It enters products in the dtype that the model computes in, so that is what the source has to take.
            weight = replace(weight, dtype=self.compute, roundable=stored.dtype)
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
            stored = mine[name].detach()
            factor = None if scale is None else mine[scale].detach()
            if wrong := contradiction(stored, factor, self._beside(name)):
                return Values(reference, None, why=wrong, wrong=True)
            found = dequantized(stored, factor)
            if found.values is None:
                return Values(reference, None, why=found.why, wrong=found.wrong)
            values, step = found.values, found.step
            if self._widened(name, values.dtype):
                values = values.to(self.compute)
            if rows is not None:
                values, step = values[rows], None if step is None else step[rows]
            return Values(reference, values, step, found.grid, found.levels)

        return read

    def _codes_of(self, name: str) -> str | None:
        """The quantized weight that this tensor belongs to beside its scale: not a weight of the source's."""
        owner, _, leaf = name.rpartition(".")
        weight = f"{owner}.weight" if leaf in STATIC_TENSORS else name.removesuffix(BIAS_SUFFIX)
        return weight if weight != name and weight in self._mine.shapes else None

    def _beside(self, name: str) -> dict[str, Tensor]:
        """What belongs to the quantized weight `name` beside its scale, by the ends of the names."""
        owner = name.rpartition(".")[0]
        named = {leaf: f"{owner}.{leaf}" for leaf in STATIC_TENSORS} if name.endswith(".weight") else {}
        named["scale_bias"] = name + BIAS_SUFFIX
        return {end: self._mine[found].detach() for end, found in named.items() if found in self._mine.shapes}

    def _widened(self, name: str, stored: torch.dtype) -> bool:
        """Whether the scheme stores this weight in a coarser float than the model computes in."""
        coarser = stored.is_floating_point and eps_of(stored) > eps_of(self.compute)
        return coarser and name.rpartition(".")[0] in self._declared

    def _discerning(self, source: str) -> bool:
        """Whether the source's class insists on float32 for this vector whatever the model is cast to."""
        names: set[str] = set(getattr(self.source, "_keep_in_fp32_modules_strict", None) or ())
        return self._known.shapes[source].dim() == 1 and source.rpartition(".")[2] in names


def beside_codes(name: str) -> list[str]:
    """The tensors that may belong to the quantized weight `name`: its scales, and what its codes need corrected."""
    owner = name.rpartition(".")[0]
    static = [f"{owner}.{leaf}" for leaf in STATIC_TENSORS] if name.endswith(".weight") else []
    return [*(name + suffix for suffix in (*SCALE_SUFFIXES, BIAS_SUFFIX)), *static]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _scaled(name: str) -> list[str]:
    return [name.removesuffix(suffix) for suffix in SCALE_SUFFIXES if name.endswith(suffix)]


def _coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return one if eps_of(one) >= eps_of(other) else other
