"""How a scheme stores each weight, and whether an Ascend chip multiplies by it as it stands or falls back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from porter.chips.catalogue import Chip
from porter.errors import PorterError
from porter.kernels.ascend.catalogue.table import catalogue
from porter.kernels.ascend.catalogue.vendor_op import A5
from porter.kernels.reference.experts_w4a8 import scale_groups
from porter.models.port import PortedSource
from porter.parallel_layout import Held, kind_of
from porter.quantization import ALIASES, SCHEMES, scheme_named
from porter.quantized_modules import quantized_modules

Verdict = Literal["native", "fallback", "undocumented"]


def _one(row: Held) -> int:
    return 1


def _by_32(row: Held) -> int:
    return -(-row.local[-1] // 32)


def _of_int4(row: Held) -> int:
    """As models.schemes stores them: gate_up_proj has a scale per row, down_proj one for each group of inputs."""
    return scale_groups(row.local[-1]) if row.name.endswith("down_proj") else 1


@dataclass(frozen=True)
class Format:
    """Weights stored in `bits` each, with `row_bits` more per output row, `group_bits` for each of the `groups` along a
    row's inputs, and `each_bits` per weight tensor.

    `dtype` is what the chip must know, `peak` the dtype of the chip's products, `operators` the vendor's operators that
    multiply by them: of linears, and of stacked experts. `called` says where public code calls these with this format
    on a chip that no page lists, by chip.
    """

    name: str
    dtype: str
    bits: int
    peak: str
    operators: tuple[tuple[str, ...], tuple[str, ...]]
    row_bits: int = 0
    group_bits: int = 0
    groups: Callable[[Held], int] = _one
    each_bits: int = 0
    called: Mapping[str, str] = field(default_factory=dict, hash=False)

    def bytes_of(self, row: Held) -> float:
        """Bytes on one card of a weight and its scales."""
        inputs = row.local[-1]
        per_row = self.row_bits + self.groups(row) * self.group_bits
        return (row.elements * self.bits + row.elements // inputs * per_row + row.layers * self.each_bits) / 8

    def arithmetic(self, row: Held) -> str:
        """`bytes_of` as a formula with its numbers."""
        rows = " x ".join(map(str, (row.layers, *row.local[:-1])))
        text = f"{rows} x {row.local[-1]} x {self.bits / 8:g} B"
        per_row = self.row_bits + self.groups(row) * self.group_bits
        if per_row:
            text += f" + {rows} rows x {per_row / 8:g} B"
        return text + (f" + {row.layers} x {self.each_bits // 8} B" if self.each_bits else "")


def _called(method: str) -> Mapping[str, str]:
    return {A5: f"vllm-ascend, quantization/methods/{method}.py"}


MATMUL, GROUPED, DYNAMIC = ("npu_quant_matmul",), ("npu_grouped_matmul",), ("npu_dynamic_quant",)
WEIGHT_ONLY = ("npu_weight_quant_batchmatmul",)
QUANTIZED = (*DYNAMIC, *MATMUL), (*DYNAMIC, *GROUPED)
BF16 = Format("bfloat16", "bfloat16", 16, "bfloat16", ((), GROUPED))
FP32 = Format("float32", "float32", 32, "float32", ((), GROUPED))
INT8 = Format("int8", "int8", 8, "int8", QUANTIZED, row_bits=32)
# Beside the row's scale, quant_bias; an input scale and offset for all rows.
STATIC_INT8 = Format("int8 static", "int8", 8, "int8", (("npu_quantize", *MATMUL), GROUPED), row_bits=64, each_bits=40)
INT8_WEIGHTS = Format("int8 weight-only", "int8", 8, "bfloat16", (WEIGHT_ONLY, GROUPED), row_bits=32)
# A scale of 64 bits per group, and scale_bias of 32 per row: the layout of the Op experts/w4a8.
INT4 = Format("int4", "int4", 4, "int8", QUANTIZED, row_bits=32, group_bits=64, groups=_of_int4)
FP8 = Format(
    "float8_e4m3fn",
    "float8_e4m3fn",
    8,
    "float8_e4m3fn",
    (MATMUL, GROUPED),
    row_bits=32,
    called=_called("w8a8fp8_dynamic"),
)
MXFP8 = Format(
    "mxfp8",
    "mxfp8",
    8,
    "float8_e4m3fn",
    (MATMUL, GROUPED),
    group_bits=8,
    groups=_by_32,
    called=_called("w8a8_mxfp8"),
)
MXFP4 = Format(
    "mxfp4", "mxfp4", 4, "mxfp4", (MATMUL, GROUPED), group_bits=8, groups=_by_32, called=_called("w4a4_mxfp4")
)

OF_MODULE: Mapping[str, Format] = MappingProxyType(
    {"fp32": FP32, "bf16": BF16, "w8a16": INT8_WEIGHTS, "w8a8": INT8, "w8a8_static": STATIC_INT8, "w4a8": INT4}
)
"""What porter makes of a module, and the format of its weight then."""


@dataclass(frozen=True)
class Planned:
    """A scheme that is planned and not converted to: `form` is that of every module which int8 takes but the head."""

    name: str
    says: str
    form: Format


PLANNED: Mapping[str, Planned] = MappingProxyType(
    {
        p.name: p
        for p in (
            Planned("fp8", "float8_e4m3fn weights and activations", FP8),
            Planned("mxfp8", "mxfp8 weights and activations, groups of 32", MXFP8),
            Planned("mxfp4", "mxfp4 weights and activations, groups of 32", MXFP4),
        )
    }
)


@dataclass(frozen=True)
class Storage:
    """A scheme as a plan counts it: the format of each module that it takes, by name; all else has `plain`.

    `port_as` is the scheme that porter converts to today; where it is another, the plan is of memory and arithmetic
    alone.
    """

    name: str
    says: str
    port_as: str
    plain: Format
    formats: Mapping[str, Format]


@dataclass(frozen=True)
class KernelVerdict:
    """Whether a chip has low-bit products for one format: `native`; `fallback`, where weights are held in bfloat16; or
    `undocumented`, where the chip knows the dtype and the vendor's page of an operator does not list the chip."""

    format: str
    use: str
    verdict: Verdict
    why: str


def ported_as(name: str | None, chip: Chip) -> str | None:
    """The scheme in which to make the port that is to be planned in scheme `name`: bf16 for those that porter does not
    write, or whose products no document gives the chip. Raises PorterError for an unknown scheme."""
    if name is None:
        return None
    wanted = ALIASES.get(name, name)
    if wanted not in SCHEMES and wanted not in PLANNED:
        raise PorterError(f"--scheme {name}: is not known; choose one of {', '.join((*SCHEMES, *PLANNED))}")
    if wanted in PLANNED:
        return "bf16"
    scheme = SCHEMES[wanted]
    forms = (OF_MODULE[made] for made in (scheme.linears, scheme.attention) if made)
    return wanted if all(_judged("linears", form, chip).verdict == "native" for form in forms) else "bf16"


def storage_of(name: str, source: PortedSource, config: Any) -> Storage:
    """The scheme `name` of a model whose `config` names no quantized modules.

    Raises PorterError where porter's own scheme does not apply to the model.
    """
    planned = PLANNED.get(name)
    if planned is None:
        scheme = scheme_named(name)
        modules = quantized_modules(source, config, scheme)
        plain = FP32 if scheme.name == "fp32" else BF16
        formats = {module: OF_MODULE[made] for module, made in modules.items()}
        return Storage(scheme.name, scheme.description, scheme.name, plain, formats)
    modules = quantized_modules(source, config, scheme_named("w8a8"))
    formats = {module: planned.form for module, made in modules.items() if made == "w8a8"}
    return Storage(name, planned.says, "bf16", BF16, formats)


def judge(storage: Storage, chip: Chip, experts: bool) -> tuple[KernelVerdict, ...]:
    """The verdict on each format of the scheme's modules; where it takes none, on the products in the plain format of
    linears and, where the model has `experts`, of those."""
    found = {}
    for module, form in storage.formats.items():
        use = "experts" if kind_of(f"{module}.weight") == "routed experts" else "linears"
        found[use, form.name] = _judged(use, form, chip)
    if not found:
        plain = storage.plain
        found = {(use, plain.name): _judged(use, plain, chip) for use in ("linears", *["experts"] * experts)}
    return tuple(found.values())


def _judged(use: str, form: Format, chip: Chip) -> KernelVerdict:
    operators = form.operators[use == "experts"]
    if form.dtype not in chip.dtypes:
        why = f"{chip.name} has no {form.dtype}: the weights are held in bfloat16 and multiplied so"
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
