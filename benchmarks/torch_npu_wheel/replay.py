"""Recorded calls through torch_npu's own functions, dispatcher and meta kernels, on tensors without values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException

from benchmarks.torch_npu_wheel.recording import Recorded, decoded, listed
from porter.kernels.ascend.catalogue.table import catalogue
from porter.kernels.ascend.catalogue.vendor_op import A2, A3, A5, I310P

SOC_VERSIONS = {A2: 223, A3: 250, A5: 260, I310P: 202}
"""The vendor's number of one chip of each kind (910B3, 910_9391, 950, 310P3: enum SocVersion in its NpuVariables.h)."""
CANN_VERSION = "8.5.0"
"""The newest release of CANN in the wheel's own table of versions; the stub libraries have none."""
DEVICES = ("npu", "meta")

Verdict = Literal["equal", "different", "refused", "unbound", "no meta"]


@dataclass(frozen=True)
class Replayed:
    """One call on one device. `detail`: the outputs that differ, or what the vendor's meta kernel or binding said."""

    call: Recorded
    device: str
    verdict: Verdict
    detail: str = ""


def has_meta(op: str) -> bool:
    """Whether the wheel can tell the outputs of `op` without a chip."""
    keys = ("Meta", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{op}", key) for key in keys)


@contextmanager
def as_chip(metas: Any, chip: str) -> Iterator[None]:
    """Inside, the vendor's meta kernels (module `metas`) take the machine for one with `chip` and CANN_VERSION."""
    versions = metas.torch_npu.npu.utils
    with ExitStack() as stack:
        for module, name, answer in (
            (metas, "get_soc_version", lambda: SOC_VERSIONS[chip]),
            (metas, "get_cann_version", lambda: CANN_VERSION),
            (versions, "_is_gte_cann_version", _cann_is_at_least),
        ):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, answer)
        yield


def _cann_is_at_least(version: str, module: str = "CANN") -> bool:
    """Of "8.5.0.alpha003" the numbers before the letters count: CANN_VERSION is a final release."""
    wanted = itertools.takewhile(str.isdigit, version.split("."))
    return [int(n) for n in CANN_VERSION.split(".")] >= [int(n) for n in wanted]


def replay(module: Any, metas: Any, call: Recorded, device: str) -> Replayed:
    """Make `call` with every argument passed, by `module`, torch_npu, on `device`: one of DEVICES."""
    mode = FakeTensorMode() if device == "npu" else nullcontext()
    with as_chip(metas, call["chip"]), mode, torch.no_grad():
        arguments = {name: decoded(value, device) for name, value in call["arguments"].items()}
        ordered = [a.name for a in catalogue()[call["op"]].signature if not a.keyword_only]
        positional = [arguments.pop(name) for name in ordered]
        try:
            result = getattr(module, call["op"])(*positional, **arguments)
        except Exception as error:  # whatever the wheel raises is what is reported
            return Replayed(call, device, _verdict(call["op"], error), first_line(error))
    got = [short(t.shape, t.dtype) for t in listed(result)]
    ours = [short(t["shape"], t["dtype"]) for t in call["outputs"]]
    if len(got) != len(ours):
        return Replayed(call, device, "different", f"{len(ours)} results; the vendor's meta kernel gives {len(got)}")
    unequal = [f"result {i} {a}; vendor's {b}" for i, (a, b) in enumerate(zip(ours, got, strict=True)) if a != b]
    return Replayed(call, device, "different", ", ".join(unequal)) if unequal else Replayed(call, device, "equal")


def _verdict(op: str, error: Exception) -> Verdict:
    """Without a meta kernel, the dispatcher looks for one only once the arguments fit the schema."""
    if has_meta(op):
        return "refused"
    return "no meta" if isinstance(error, (NotImplementedError, UnsupportedOperatorException)) else "unbound"


def first_line(error: Exception) -> str:
    """The type and the first line of the message."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def short(shape: Any, dtype: Any) -> str:
    """A tensor in a word: int8[3, 4]."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
