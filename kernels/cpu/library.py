"""The compiled CPU kernels as ctypes functions, loaded when first needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_double, c_int32, c_int64, c_void_p

import torch

from porter.kernels.cpu.build import BuildError, build, selected_isa

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.bool: 3}
"""torch dtypes to the codes in abi.h."""

Function = Callable[..., None]

_POINTER, _SIZE, _CODE, _REAL = c_void_p, c_int64, c_int32, c_double

SIGNATURES: dict[str, tuple[object, ...]] = {
    "rms_norm": (*[_POINTER] * 6, *[_SIZE] * 5, _REAL, _REAL, _CODE, _CODE),
    "swiglu": (_POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _CODE, _CODE),
    "rope": (*[_POINTER] * 7, *[_CODE] * 4),
    "linear": (*[_POINTER] * 5, *[_SIZE] * 6, *[_CODE] * 3),
    "linear_w8a8": (*[_POINTER] * 5, *[_SIZE] * 6, *[_CODE] * 2),
    "swiglu_clamped": (_POINTER, _POINTER, _SIZE, _SIZE, _SIZE, _REAL, _CODE, _CODE),
    "sink_attention": (*[_POINTER] * 8, _REAL, *[_CODE] * 3),
    "clamped_experts": (*[_POINTER] * 9, _REAL, *[_CODE] * 5),
    "hyper_collapse": (*[_POINTER] * 8, _REAL, _REAL, _CODE, _CODE),
    "hyper_expand": (*[_POINTER] * 6, _CODE, _CODE),
    "compress": (*[_POINTER] * 8, *[_CODE] * 3),
    "attention": (*[_POINTER] * 7, _REAL, *[_CODE] * 3),
    "mla": (*[_POINTER] * 9, _REAL, *[_CODE] * 3),
    "experts": (*[_POINTER] * 9, *[_CODE] * 5),
    "router": (*[_POINTER] * 7, _REAL, *[_CODE] * 4),
    "causal_conv1d": (*[_POINTER] * 7, _CODE, _CODE),
    "delta_gates": (*[_POINTER] * 7, _REAL, *[_CODE] * 4),
    "sigmoid_gate": (*[_POINTER] * 3, *[_SIZE] * 4, *[_CODE] * 3),
    "delta_rule": (*[_POINTER] * 9, *[_CODE] * 3),
    "add": (_POINTER, _POINTER, _POINTER, _SIZE, _CODE),
    "copy": (_POINTER, _POINTER, _POINTER),
    "run": (_POINTER, _SIZE),
    "fingerprint": (_POINTER, _POINTER, _POINTER, _SIZE, _CODE),
    "measure": (*[_POINTER] * 7, _SIZE, _SIZE, _CODE, _CODE),
    "indexer": (*[_POINTER] * 7, _REAL, *[_CODE] * 4),
    "sparse_mla": (*[_POINTER] * 10, _REAL, *[_CODE] * 3),
    "variable_length": (*[_POINTER] * 7, _REAL, *[_CODE] * 2),
    "difference": (_POINTER, _POINTER, _POINTER, _SIZE, _CODE, _CODE, _CODE),
}
"""Argument types of each function `porter_<name>`, in the order of its C declaration."""

RECORDED = (
    "rms_norm", "swiglu", "rope", "linear", "linear_w8a8", "attention", "mla", "experts", "add", "copy", "router",
    "sigmoid_gate",
)  # fmt: skip
"""Functions that a recorded program can call; the place of each is its code in program.cpp."""


class KernelLibrary:
    """The functions of the shared library as attributes: `library.rms_norm(...)`.

    Compiles and loads on `load()`, or on the first attribute. After a failure `reason` says why, and stays.
    """

    rms_norm: Function
    swiglu_clamped: Function
    sink_attention: Function
    clamped_experts: Function
    hyper_collapse: Function
    hyper_expand: Function
    compress: Function
    swiglu: Function
    rope: Function
    linear: Function
    linear_w8a8: Function
    attention: Function
    mla: Function
    experts: Function
    router: Function
    causal_conv1d: Function
    delta_gates: Function
    sigmoid_gate: Function
    delta_rule: Function
    add: Function
    copy: Function
    run: Function
    fingerprint: Function
    measure: Function
    indexer: Function
    sparse_mla: Function
    variable_length: Function
    difference: Function

    def __init__(self, isa: str | None = None) -> None:
        """`isa` None: the one that `build.selected_isa` chooses when loading."""
        self.isa = isa
        self.loaded = False
        self.reason: str | None = None

    def load(self) -> str | None:
        """None once the kernels are loaded, else the reason why they cannot be."""
        if self.loaded or self.reason is not None:
            return self.reason
        try:
            self.isa = self.isa or selected_isa()
            handle = ctypes.CDLL(str(build(self.isa)))
        except (BuildError, OSError) as error:
            self.reason = f"CPU kernels are not available: {error}"
            return self.reason
        for name, types in SIGNATURES.items():
            function = getattr(handle, f"porter_{name}")
            function.argtypes = types
            function.restype = None
            setattr(self, name, function)
        self.loaded = True
        return None

    def __getattr__(self, name: str) -> Function:
        if name not in SIGNATURES:
            raise AttributeError(name)
        reason = self.load()
        if reason is not None:
            raise BuildError(reason)
        function: Function = self.__dict__[name]
        return function
