"""What an Op is, what a provider owes, and how far two implementations of an Op may be apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

Arguments = tuple[Any, ...]
Rung = Literal["declared", "schema", "emulated", "interpreted", "compiled", "measured"]

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

UNIT_ROUNDOFF: Mapping[torch.dtype, float] = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
"""Largest relative error of rounding a normal number to the nearest value of the dtype."""


class UnknownOp(LookupError):
    """No Op, or no provider, of that name is registered."""


class StrictFallback(RuntimeError):
    """A provider refused a call, or has none of the Op, where falling back is forbidden."""


@dataclass(frozen=True)
class Cost:
    """What one call must move and compute: bytes of memory read and written once, and floating or integer operations
    (a multiply-add counts as two)."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Case:
    """One generated call: a label for test output, and the positional arguments."""

    label: str
    arguments: Arguments


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an Op works internally on activations of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Tolerance:
    """How far a right implementation may be from the float64 oracle, as `Op.error` measures it.

    `argument` states why. `terms(*arguments)` is the number of roundings in the compute dtype whose errors add up at
    random along one output value, so they contribute sqrt(terms) unit roundoffs; `roundings` counts roundings to the
    output dtype; `floor` is what the method costs beside rounding (flipped int8 codes), in any dtype.
    """

    argument: str
    terms: Callable[..., float]
    roundings: float = 1.0
    floor: float = 0.0

    def relative(self, dtype: torch.dtype, *arguments: Any) -> float:
        """The bound for activations of `dtype` and these arguments."""
        accumulated = math.sqrt(max(self.terms(*arguments), 1.0)) * UNIT_ROUNDOFF[compute_dtype(dtype)]
        return self.roundings * UNIT_ROUNDOFF[dtype] + accumulated + self.floor


def moved_bytes(*arguments: Any) -> int:
    """Bytes of the tensors among `arguments`, each counted once, views at the size of what they show."""
    return sum(a.numel() * a.element_size() for a in arguments if isinstance(a, torch.Tensor))


def tensors(outputs: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of an Op's output, in order."""
    return (outputs,) if isinstance(outputs, torch.Tensor) else tuple(t for t in outputs if isinstance(t, torch.Tensor))


def row_error(candidate: Any, oracle: Any, *arguments: Any) -> float:
    """The largest relative L2 error of any row (last dimension) of any output; infinite where shapes differ, or where
    one has NaN, or values beyond the candidate's dtype, and the other does not.

    Rows, so that a wrong small row does not hide behind large ones. Half the spacing of the candidate's subnormal
    numbers is forgiven in each value.
    """
    errors = [_row_error(c, o) for c, o in zip(tensors(candidate), tensors(oracle), strict=True)]
    return max(errors, default=0.0)


def _row_error(candidate: torch.Tensor, oracle: torch.Tensor) -> float:
    if candidate.shape != oracle.shape:
        return math.inf
    if not oracle.is_floating_point():
        return 0.0 if torch.equal(candidate, oracle) else math.inf
    if candidate.numel() == 0:
        return 0.0
    limits = torch.finfo(candidate.dtype)
    odd = ~torch.isfinite(oracle.to(candidate.dtype))
    if not torch.allclose(candidate[odd], oracle.to(candidate.dtype)[odd], rtol=0.0, atol=0.0, equal_nan=True):
        return math.inf
    if not bool(candidate[~odd].isfinite().all()):
        return math.inf
    candidate, oracle = candidate.double().masked_fill(odd, 0.0), oracle.double().masked_fill(odd, 0.0)
    forgiven = limits.smallest_normal * limits.eps / 2
    error = ((candidate - oracle).abs() - forgiven).clamp_min(0.0).norm(dim=-1)
    return float(torch.where(error == 0, 0.0, error / oracle.norm(dim=-1)).max())


def upcast(arguments: Arguments, dtype: torch.dtype = torch.float64) -> Arguments:
    """The arguments with floating-point tensors in `dtype`; integers, masks and scalars as they are."""
    return tuple(a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in arguments)


@dataclass(frozen=True)
class Op:
    """A contract `(name, variant)` that providers implement.

    `schema` is the torch.library signature without the name: "(Tensor x, float eps) -> Tensor".
    `reference(*arguments)` is the meaning, in plain torch: fp16 and bf16 compute in float32 and round once at the end,
    float64 stays float64. `fake(*arguments)` gives empty outputs of the right shape, dtype and device.
    `inputs(dtype)` generates seeded cases with activations of `dtype`; `dtypes` are those it can generate.
    `cost(*arguments)` needs shapes only, so meta tensors do.
    `error(candidate, oracle, *arguments)` is the number that `tolerance` bounds.
    `exact(*arguments)` is the float64 oracle where it is not the reference on upcast arguments: quantization codes are
    part of the meaning, so they are chosen as the reference chooses them.
    """

    name: str
    variant: str
    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    inputs: Callable[[torch.dtype], Iterable[Case]]
    tolerance: Tolerance
    cost: Callable[..., Cost]
    error: Callable[..., float] = row_error
    exact: Callable[..., Any] | None = None
    dtypes: tuple[torch.dtype, ...] = FLOATING

    @property
    def key(self) -> tuple[str, str]:
        """(name, variant)."""
        return self.name, self.variant

    @property
    def qualified(self) -> str:
        """The name under torch.ops.porter."""
        return f"{self.name}_{self.variant}"

    def oracle(self, *arguments: Any) -> Any:
        """The outputs in float64."""
        if self.exact is not None:
            return self.exact(*arguments)
        return self.reference(*upcast(arguments))


@dataclass(frozen=True)
class Evidence:
    """The highest rung that (op, provider, chip) has reached, in words, with the date and device where measured."""

    rung: Rung
    detail: str = ""
    date: str = ""
    device: str = ""


@dataclass(frozen=True)
class Implementation:
    """A provider's kernel for one Op.

    `accepts(*arguments)` returns None when `call(*arguments)` computes the Op on these very arguments, else the reason
    why not, in a few words and the same for every call that fails for that reason. It must refuse tensors on another
    device, meta included. It runs before every call, so it must cost well under a microsecond and never touch values.
    """

    call: Callable[..., Any]
    accepts: Callable[..., str | None]
    evidence: Evidence


class Provider(Protocol):
    """A set of kernels for some chips. Constructing one is free; libraries load when a kernel is first needed."""

    name: str

    def supported(self, chip_name: str) -> str | None:
        """None when the kernels run on this chip, else the reason why not.

        `chip_name` is a catalogue name ("cpu-x86-avx2"), or "cpu" for the CPU of this machine. Compiles nothing.
        """

    def implementation(self, name: str, variant: str, chip_name: str = "cpu") -> Implementation | None:
        """The kernel of an Op on a chip that is supported; None when there is none."""

    def prepare(self) -> None:
        """Load what the kernels need now; a failure shows as a refusal of every later call."""
