"""Values: scales that cannot be, derived tensors that do not follow, and pairs that loading sets apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from porter.ascend_v1.activation import reciprocal_error
from porter.ascend_v1.check.directory import AscendDirectory
from porter.ascend_v1.check.finding import Finding
from porter.ascend_v1.codes import deq_value, quant_bias, scale_bias, unpack_rows
from porter.ascend_v1.fused_groups import groups_of
from porter.ascend_v1.quant_type import TYPES, Linear
from porter.errors import PorterError

BIAS_TOLERANCE = 2.0**-21
"""Of quant_bias: msmodelslim sums and multiplies in float32, whose unit is 2**-24, over a few operations."""

SUM_TOLERANCE = 1e-4
"""Of scale_bias, relative to 8 * sum |code| * scale: a float32 sum over some thousands of columns."""


@dataclass
class Values:
    """Reads each linear once and says what its numbers show; `progress` is told of each linear."""

    directory: AscendDirectory
    progress: Callable[[int, int], None] | None = None
    _pairs: dict[str, float] = field(default_factory=dict)
    _narrowed: dict[str, float] = field(default_factory=dict)

    def findings(self) -> Iterator[Finding]:
        """Those of every linear of a known type."""
        linears = self.directory.quantized
        for number, linear in enumerate(linears.values()):
            yield from self._of_linear(linear)
            if self.progress is not None:
                self.progress(number + 1, len(linears))
        yield from self._shared_inputs()
        yield from self._rounded()

    def _of_linear(self, linear: Linear) -> Iterator[Finding]:
        kind = TYPES[self.directory.described[linear.name]]
        sound = True
        for suffix in ("weight_scale", "input_scale", "deq_scale"):
            value = self._load(linear, suffix) if suffix in kind.tensors else None
            if value is not None:
                for finding in self._scale(linear, suffix, deq_value(value) if suffix == "deq_scale" else value):
                    sound = False
                    yield finding
        yield from self._offsets(linear, kind.tensors)
        if sound and kind.static:
            yield from self._static(linear)
        if sound and kind.packed:
            yield from self._packed(linear)
        if sound and "weight_scale" in kind.tensors and not kind.packed:
            self._note_narrowed(linear)

    def _scale(self, linear: Linear, suffix: str, value: Tensor) -> Iterator[Finding]:
        wide = value.to(torch.float32)
        bad = int((~wide.isfinite() | (wide <= 0)).sum())
        if bad:
            words = (
                f"{bad} of {wide.numel()} scales are NaN, infinite, 0 or negative: those outputs are not the model's"
            )
            yield self._finding("scale-values", linear, suffix, words, "quantize the linear again")

    def _offsets(self, linear: Linear, suffixes: tuple[str, ...]) -> Iterator[Finding]:
        offset = self._load(linear, "weight_offset") if "weight_offset" in suffixes else None
        if offset is not None and bool((offset.to(torch.float32) != 0).any()):
            kind = self.directory.described[linear.name]
            words = (
                "is passed as antiquant_offset, which is added; msmodelslim subtracts it"
                if kind == "W8A16"
                else f"is not 0, and {kind} leaves it out"
            )
            yield self._finding("weight-offset", linear, "weight_offset", words, "quantize the weight symmetrically")
        given = self._load(linear, "input_offset") if "input_offset" in suffixes else None
        if given is not None:
            wide = given.to(torch.float32)
            if bool(((wide != wide.round()) | (wide < -128) | (wide > 127)).any()):
                words = "is loaded into int8, which holds no such value"
                yield self._finding("input-offset", linear, "input_offset", words, "calibrate the input again")

    def _static(self, linear: Linear) -> Iterator[Finding]:
        found = {s: self._load(linear, s) for s in ("weight", "deq_scale", "quant_bias", "input_scale", "input_offset")}
        weight, stored, scale, offset = (found[s] for s in ("weight", "quant_bias", "input_scale", "input_offset"))
        if scale is not None:
            self._note_pair(linear, scale)
        if weight is None or stored is None or offset is None or found["deq_scale"] is None:
            return
        if weight.dtype != torch.int8 or stored.dtype != torch.int32 or weight.dim() != 2:
            return
        deq, bias = deq_value(found["deq_scale"]), self._load(linear, "bias")
        if deq.shape != stored.shape or stored.shape != weight.shape[:1] or offset.numel() != 1:
            return
        if not bool(offset.to(torch.float32).isfinite()) or (bias is not None and bias.shape != stored.shape):
            return
        bias = None if bias is None else bias.to(torch.float64)
        zero = int(offset.to(torch.float32).round())
        wrong = _wrong(stored, weight, deq, zero, bias)
        if not wrong:
            return
        tried = {
            "it has the sign of the offset reversed": (-zero, bias),
            "the bias is left out": (zero, None),
            "the bias is in it twice": (zero, None if bias is None else 2 * bias),
            "the offset is left out": (0, bias),
        }
        cause = next((words for words, (o, b) in tried.items() if not _wrong(stored, weight, deq, o, b)), "")
        words = f"differs from round(bias / deq_scale - sum(weight) * input_offset) in {wrong} of {stored.numel()} rows"
        yield self._finding("quant-bias", linear, "quant_bias", words + (f": {cause}" if cause else ""), "recompute it")

    def _packed(self, linear: Linear) -> Iterator[Finding]:
        packed, scale, stored = (self._load(linear, s) for s in ("weight", "weight_scale", "scale_bias"))
        if packed is None or scale is None or stored is None or packed.dtype != torch.int8:
            return
        if packed.dim() != 2:
            return
        codes = unpack_rows(packed)
        if scale.shape != (codes.shape[0], 1) or stored.dim() != 2 or stored.shape[0] != codes.shape[0]:
            return
        wanted = scale_bias(codes, scale, linear.splits_inputs)
        room = SUM_TOLERANCE * 8 * codes.abs().sum(dim=1, keepdim=True) * scale.to(torch.float32).abs() + 1e-30
        if stored.shape == wanted.shape and _near(stored, wanted, room):
            return
        total = stored.to(torch.float32).sum(dim=1, keepdim=True)
        if _near(total, wanted.sum(dim=1, keepdim=True), room):
            if stored.shape == wanted.shape:
                words = "its slices are not those of the columns: right without tensor parallelism only"
                yield self._finding("scale-bias", linear, "scale_bias", words, "recompute it in 16 column slices")
            return
        swapped = codes.reshape(-1, 2, codes.shape[1]).flip(1).reshape(codes.shape)
        if _near(total, scale_bias(swapped, scale, False), room):
            words = "fits the rows the other way round: the even row has to be in the low nibbles"
            yield self._finding("nibble-order", linear, "weight", words, "swap the nibbles of every byte")
        else:
            words = "is not 8 * sum(weight * weight_scale): every output is off by a constant times its token's scale"
            yield self._finding("scale-bias", linear, "scale_bias", words, "recompute it from the codes as stored")

    def _shared_inputs(self) -> Iterator[Finding]:
        static = [n for n in self.directory.quantized if TYPES[self.directory.described[n]].static]
        for group in groups_of(static, self.directory.model_type):
            seen = {self._input(name) for name in group.members}
            if len(seen) > 1:
                words = f"{group.layer} holds one input_scale and offset, the last loaded; its parts have {len(seen)}"
                linear = self.directory.quantized[group.members[-1]]
                yield self._finding("shared-input", linear, "input_scale", words, "calibrate its parts together")

    def _input(self, name: str) -> tuple[float, ...]:
        linear = self.directory.quantized[name]
        found = [self._load(linear, suffix) for suffix in ("input_scale", "input_offset")]
        return tuple(float(v.reshape(-1)[0]) for v in found if v is not None and v.numel())

    def _note_pair(self, linear: Linear, scale: Tensor) -> None:
        wide = scale.to(torch.float32).reshape(-1)
        loaded = wide.to(self.directory.model_dtype)
        if loaded.numel() == 1 and float(loaded) > 0:
            # What the chip multiplies by, against what deq_scale was made of.
            effective = float(1 / (1 / loaded).double())
            self._pairs[linear.name] = abs(effective / float(wide) - 1)

    def _note_narrowed(self, linear: Linear) -> None:
        scale = self._load(linear, "weight_scale")
        if scale is not None and scale.numel():
            wide = scale.to(torch.float64)
            error = (wide.to(self.directory.model_dtype).double() / wide - 1).abs()
            self._narrowed[linear.name] = float(error.max())

    def _rounded(self) -> Iterator[Finding]:
        dtype = str(self.directory.model_dtype).removeprefix("torch.")
        for errors, suffix, against in (
            (self._pairs, "input_scale", "deq_scale keeps its float32 value, so that outputs are off by"),
            (self._narrowed, "weight_scale", "codes were made for its float32 value, so that rows are off by"),
        ):
            exact = _least_error(self.directory.model_dtype) if suffix == "input_scale" else 0.0
            off = {name: error for name, error in errors.items() if error > exact}
            if not off:
                continue
            worst = max(off, key=off.__getitem__)
            mean, largest = 100 * sum(off.values()) / len(errors), 100 * off[worst]
            words = (
                f"{len(off)} of {len(errors)} change when they are loaded as {dtype}; {against} {mean:.2f} % on average"
            )
            remedy = f"at most {largest:.2f} %; choose scales that {dtype} holds"
            yield self._finding("rounded-scale", self.directory.quantized[worst], suffix, words, remedy, note=True)

    def _load(self, linear: Linear, suffix: str) -> Tensor | None:
        name = f"{linear.name}.{suffix}"
        weights = self.directory.weights
        return weights.load(name) if name in weights and weights.info(name).torch_dtype is not None else None

    def _finding(self, rule: str, linear: Linear, suffix: str, words: str, remedy: str, note: bool = False) -> Finding:
        name = f"{linear.name}.{suffix}"
        return Finding(rule, self.directory.file_of(name), name, words, remedy, "note" if note else "fault")


def _wrong(stored: Tensor, weight: Tensor, deq: Tensor, zero: int, bias: Tensor | None) -> int:
    """Rows whose quant_bias is not what it should be."""
    try:
        wanted = quant_bias(weight, deq, zero, bias).to(torch.float64)
    except PorterError:
        return int(stored.numel())
    room = 1 + BIAS_TOLERANCE * (weight.to(torch.float64).sum(dim=1) * zero).abs() + BIAS_TOLERANCE * wanted.abs()
    return int(((stored.to(torch.float64) - wanted).abs() > room).sum())


def _near(found: Tensor, wanted: Tensor, room: Tensor) -> bool:
    return bool(((found.to(torch.float32) - wanted).abs() <= room).all())


def _least_error(dtype: torch.dtype) -> float:
    """An error of a reciprocal that no choice of a scale near by avoids: half a unit of the dtype's last place, over
    the four values that are tried."""
    values = torch.linspace(1, 2, 129)[:128].to(dtype)
    return max(min(reciprocal_error(v) for v in values[i : i + 4]) for i in range(0, 124))
