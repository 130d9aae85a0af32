"""How a scheme stores each weight, and whether an Ascend chip multiplies by it as it stands or falls back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from porter.chips.catalogue import Chip
from porter.errors import PorterError
from porter.kernels.ascend.catalogue.table import catalogue
from porter.kernels.ascend.catalogue.vendor_op import A5
from porter.parallel_layout import Held
from porter.quantization import ALIASES, SCHEMES

Verdict = Literal["native", "fallback", "undocumented"]


@dataclass(frozen=True)
class Format:
    """Weights stored in `bits` each, with `row_bits` more per output row and `group_bits` per `group` along the input.

    `dtype` is what the chip must know, `peak` the dtype of the chip's products, `operators` the vendor's operators that
    multiply by them: of linears, and of stacked experts.
    """

    name: str
    dtype: str
    bits: int
    peak: str
    operators: tuple[tuple[str, ...], tuple[str, ...]]
    row_bits: int = 0
    group: int = 0
    group_bits: int = 0
    called: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Where public code calls the operators with this format on a chip that no page lists, by chip."""

    def bytes_of(self, row: Held) -> float:
        """Bytes on one card of a weight and its scales."""
        *_, outputs, inputs = row.local if len(row.local) > 1 else (1, *row.local)
        rows = row.elements / inputs
        groups = -(-inputs // self.group) if self.group else 0
        return (row.elements * self.bits + rows * (self.row_bits + groups * self.group_bits)) / 8

    def arithmetic(self, row: Held) -> str:
        """`bytes_of` as a formula with its numbers."""
        shape = " x ".join(map(str, row.local))
        text = f"{row.layers} x {shape} x {self.bits / 8:g} B"
        if self.row_bits:
            text += f" + {row.layers} x {' x '.join(map(str, row.local[:-1]))} rows x {self.row_bits // 8} B"
        if self.group_bits:
            groups = -(-row.local[-1] // self.group)
            text += f" + {row.layers} x {' x '.join(map(str, row.local[:-1]))} rows x {groups} groups x {self.group_bits // 8} B"
        return text


def _called(method: str) -> Mapping[str, str]:
    return {A5: f"vllm-ascend, quantization/methods/{method}.py"}


MATMUL, GROUPED = ("npu_quant_matmul",), ("npu_grouped_matmul",)
PRODUCTS = MATMUL, GROUPED
QUANTIZED = ("npu_dynamic_quant", *MATMUL), ("npu_dynamic_quant", *GROUPED)
BF16 = Format("bfloat16", "bfloat16", 16, "bfloat16", ((), GROUPED))
FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        f.name: f
        for f in (
            BF16,
            Format("float32", "float32", 32, "float32", ((), GROUPED)),
            Format("int8", "int8", 8, "int8", QUANTIZED, row_bits=32),
            Format("int8 weight-only", "int8", 8, "bfloat16", (("npu_weight_quant_batchmatmul",), GROUPED), row_bits=32),
            # AscendV1: the scale's bits widened to 64, and scale_bias float32, per output row.
            Format("int4", "int4", 4, "int8", QUANTIZED, row_bits=96),
            Format("float8_e4m3fn", "float8_e4m3fn", 8, "float8_e4m3fn", PRODUCTS, row_bits=32, called=_called("w8a8fp8_dynamic")),
            Format("mxfp8", "mxfp8", 8, "float8_e4m3fn", PRODUCTS, group=32, group_bits=8, called=_called("w8a8_mxfp8")),
            Format("mxfp4", "mxfp4", 4, "mxfp4", PRODUCTS, group=32, group_bits=8, called=_called("w4a4_mxfp4")),
        )
    }
)


@dataclass(frozen=True)
class Storage:
    """A scheme as a plan counts it: the formats of quantized linears, of routed experts and of the output head.

    `port_as` is the scheme that porter converts to today; where it is another, the plan is of memory and arithmetic
    alone.
    """

    name: str
    linear: str
    experts: str
    head: str
    port_as: str
    says: str


STORAGES: Mapping[str, Storage] = MappingProxyType(
    {
        s.name: s
        for s in (
            Storage("fp32", "float32", "float32", "float32", "fp32", "float32 throughout"),
            Storage("bf16", "bfloat16", "bfloat16", "bfloat16", "bf16", "bfloat16 throughout"),
            Storage("w8a16", *["int8 weight-only"] * 3, "w8a16", "int8 weights, activations as they are"),
            Storage("w8a8", "int8", "int8", "int8 weight-only", "w8a8", "int8 weights, int8 activations per token"),
            Storage("w4a8", "int8", "int4", "bfloat16", "w8a8", "int4 routed experts, the other linears as w8a8"),
            Storage("fp8", "float8_e4m3fn", "float8_e4m3fn", "bfloat16", "bf16", "float8_e4m3fn weights and activations"),
            Storage("mxfp8", "mxfp8", "mxfp8", "bfloat16", "bf16", "mxfp8 weights and activations, groups of 32"),
            Storage("mxfp4", "mxfp4", "mxfp4", "bfloat16", "bf16", "mxfp4 weights and activations, groups of 32"),
        )
    }
)


@dataclass(frozen=True)
class KernelVerdict:
    """Whether a chip has low-bit products for one format: `native`; `fallback`, where weights are held in bfloat16; or
    `undocumented`, where the chip knows the dtype and the vendor's page of an operator does not list the chip."""

    format: str
    use: str
    verdict: Verdict
    why: str


def storage_named(name: str) -> Storage:
    """The scheme of that name or alias. Raises PorterError naming those that can be planned."""
    wanted = ALIASES.get(name, name)
    storage, scheme = STORAGES.get(wanted), SCHEMES.get(wanted)
    if storage is None and scheme is None:
        known = ", ".join(dict.fromkeys((*STORAGES, *SCHEMES)))
        raise PorterError(f"--scheme {name}: is not known; choose one of {known}")
    if storage is None and scheme is not None:
        form = "int8" if scheme.activation == "int8" else "int8 weight-only"
        return Storage(wanted, form, form, "int8 weight-only", wanted, scheme.description)
    assert storage is not None
    return replace(storage, port_as=wanted) if scheme is not None else storage


def converts(name: str) -> bool:
    """Whether porter writes that scheme, not only plans it."""
    return name in SCHEMES


def judge(storage: Storage, chip: Chip, experts: bool) -> tuple[KernelVerdict, ...]:
    """The verdict on the scheme's linears and, where the model has `experts`, on those."""
    uses = [("linears", FORMATS[storage.linear], 0), *([("experts", FORMATS[storage.experts], 1)] if experts else [])]
    return tuple(_judged(use, form, form.operators[index], chip) for use, form, index in uses)


def _judged(use: str, form: Format, operators: tuple[str, ...], chip: Chip) -> KernelVerdict:
    if form.dtype not in chip.dtypes:
        why = f"{chip.name} has no {form.dtype} ({chip.source}): the weights are held in bfloat16 and multiplied so"
        return KernelVerdict(form.name, use, "fallback", why)
    if not operators:
        return KernelVerdict(form.name, use, "native", "the chip's own matrix product")
    if chip.name in form.called:
        why = f"{' and '.join(operators)}, called so by {form.called[chip.name]}; no page lists the chip"
        return KernelVerdict(form.name, use, "native", why)
    known = catalogue()
    for name in operators:
        if name not in known:
            return KernelVerdict(form.name, use, "undocumented", f"{name} is not in porter's catalogue")
        if chip.name not in known[name].chips:
            why = f"{chip.name} has {form.dtype}, and {known[name].page} does not list the chip for {name}"
            return KernelVerdict(form.name, use, "undocumented", why)
    return KernelVerdict(form.name, use, "native", " and ".join(operators))


def held_as(form: Format, chip: Chip) -> Format:
    """The format in which the chip holds weights of `form`: bfloat16 where it does not know the dtype."""
    return form if form.dtype in chip.dtypes else BF16
