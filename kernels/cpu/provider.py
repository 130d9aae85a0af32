"""The CPU provider: C++ kernels compiled for this processor at first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from porter.kernels.contract import Evidence, Implementation
from porter.kernels.cpu.attention import accepts_attention, accepts_mla, attention, mla_attention, mla_expanded
from porter.kernels.cpu.build import BuildError, find_compiler, selected_isa, source_directory
from porter.kernels.cpu.compressor import accepts_overlapped, accepts_windowed, overlapped, windowed
from porter.kernels.cpu.delta_net import (
    accepts_causal_conv1d,
    accepts_delta_gates,
    accepts_gated_delta_rule,
    accepts_sigmoid_gate,
    causal_conv1d,
    delta_gates,
    gated_delta_rule,
    sigmoid_gate,
)
from porter.kernels.cpu.experts import (
    accepts_clamped_experts,
    accepts_clamped_int8_experts,
    accepts_experts,
    accepts_int8_experts,
    clamped_experts,
    clamped_int8_experts,
    experts,
    int8_experts,
)
from porter.kernels.cpu.grouped_linear import accepts_grouped_linear, grouped_linear
from porter.kernels.cpu.hyper_connection import (
    accepts_collapse,
    accepts_expand,
    accepts_head,
    collapse,
    expand,
    head,
)
from porter.kernels.cpu.library import KernelLibrary
from porter.kernels.cpu.linear import accepts_int8, accepts_linear, accepts_w8a8, linear, linear_w8a8, linear_w8a16
from porter.kernels.cpu.norm import (
    accepts_clamped,
    accepts_gated,
    accepts_rms_norm,
    accepts_second,
    accepts_swiglu,
    accepts_unweighted,
    add_rms_norm,
    clamped_swiglu,
    gated_rms_norm,
    rms_norm,
    swiglu,
    unweighted_rms_norm,
)
from porter.kernels.cpu.rope import (
    accepts_complex,
    accepts_interleaved,
    accepts_rope,
    accepts_trailing,
    complex_rope,
    rope,
    trailing_rope,
)
from porter.kernels.cpu.router import (
    accepts_grouped_sigmoid,
    accepts_grouped_softmax,
    accepts_router,
    router_grouped_sigmoid,
    router_grouped_softmax,
    router_softmax,
)
from porter.kernels.cpu.score_router import accepts_hash, accepts_sqrtsoftplus, router_hash, router_sqrtsoftplus
from porter.kernels.cpu.sink_attention import accepts_sink_attention, sink_attention
from porter.kernels.cpu.sparse_attention import accepts_indexer, accepts_sparse_mla, indexer, sparse_mla_attention
from porter.kernels.cpu.variable_length import accepts_variable_length, variable_length

Accepts = Callable[..., "str | None"]
Make = Callable[[KernelLibrary], Callable[..., Any]]

KERNELS: dict[tuple[str, str], tuple[Accepts, Make]] = {
    ("rms_norm", "standard"): (accepts_rms_norm, lambda k: rms_norm(k, 0.0)),
    ("rms_norm", "zero_centered"): (accepts_rms_norm, lambda k: rms_norm(k, 1.0)),
    ("rms_norm", "gated"): (accepts_gated, gated_rms_norm),
    ("add_rms_norm", "standard"): (accepts_second, lambda k: add_rms_norm(k, 0.0)),
    ("add_rms_norm", "zero_centered"): (accepts_second, lambda k: add_rms_norm(k, 1.0)),
    ("rms_norm", "unweighted"): (accepts_unweighted, unweighted_rms_norm),
    ("swiglu", "clamped"): (accepts_clamped, clamped_swiglu),
    ("swiglu", "standard"): (accepts_swiglu, swiglu),
    ("rope", "half"): (accepts_rope, lambda k: rope(k, False)),
    ("rope", "interleaved"): (accepts_interleaved, lambda k: rope(k, True)),
    ("rope", "complex"): (accepts_complex, complex_rope),
    ("rope", "trailing"): (accepts_trailing, trailing_rope),
    ("linear", "grouped"): (accepts_grouped_linear, grouped_linear),
    ("linear", "standard"): (accepts_linear, linear),
    ("linear", "w8a16"): (accepts_int8, linear_w8a16),
    ("linear", "w8a8"): (accepts_w8a8, linear_w8a8),
    ("attention", "gqa"): (accepts_attention, attention),
    ("attention", "variable_length"): (accepts_variable_length, variable_length),
    ("attention", "sink"): (accepts_sink_attention, sink_attention),
    ("compressor", "windowed"): (accepts_windowed, windowed),
    ("compressor", "overlapped"): (accepts_overlapped, overlapped),
    ("hyper_connection", "collapse"): (accepts_collapse, collapse),
    ("hyper_connection", "expand"): (accepts_expand, expand),
    ("hyper_connection", "head"): (accepts_head, head),
    ("mla_attention", "absorbed"): (accepts_mla, mla_attention),
    ("mla_attention", "expanded"): (accepts_mla, mla_expanded),
    ("indexer", "lightning"): (accepts_indexer, indexer),
    ("sparse_mla_attention", "absorbed"): (accepts_sparse_mla, sparse_mla_attention),
    ("router", "softmax"): (accepts_router, router_softmax),
    ("router", "grouped_sigmoid"): (accepts_grouped_sigmoid, router_grouped_sigmoid),
    ("router", "grouped_softmax"): (accepts_grouped_softmax, router_grouped_softmax),
    ("router", "sqrtsoftplus"): (accepts_sqrtsoftplus, router_sqrtsoftplus),
    ("router", "hash"): (accepts_hash, router_hash),
    ("experts", "clamped"): (accepts_clamped_experts, clamped_experts),
    ("experts", "clamped_w8a16"): (accepts_clamped_int8_experts, lambda k: clamped_int8_experts(k, False)),
    ("experts", "clamped_w8a8"): (accepts_clamped_int8_experts, lambda k: clamped_int8_experts(k, True)),
    ("experts", "standard"): (accepts_experts, experts),
    ("experts", "w8a16"): (accepts_int8_experts, lambda k: int8_experts(k, False)),
    ("experts", "w8a8"): (accepts_int8_experts, lambda k: int8_experts(k, True)),
    ("causal_conv1d", "silu"): (accepts_causal_conv1d, causal_conv1d),
    ("delta_gates", "softplus"): (accepts_delta_gates, delta_gates),
    ("sigmoid_gate", "standard"): (accepts_sigmoid_gate, sigmoid_gate),
    ("gated_delta_rule", "chunked"): (accepts_gated_delta_rule, lambda k: gated_delta_rule(k, True)),
    ("gated_delta_rule", "recurrent"): (accepts_gated_delta_rule, lambda k: gated_delta_rule(k, False)),
}
"""(op, variant) to what a kernel accepts and how to make it from the loaded library."""


MEASURED = Evidence(
    "measured",
    "within tolerance of the float64 oracle with AVX-512 (VNNI, BF16), AVX2 and no vector flags; speed apart",
    date="2026-11-30",
    device="AMD EPYC, Zen 4, 2 cores",
)


class CpuProvider:
    """Kernels for the CPU of this machine; see build.py for how they are compiled and cached."""

    name = "cpu"

    def __init__(self, isa: str | None = None) -> None:
        """`isa` forces an instruction set; None takes `$PORTER_CPU_ISA` or the best that the processor runs."""
        self.library = KernelLibrary(isa)

    def supported(self, chip_name: str) -> str | None:
        """None for CPU chips where the kernels are loaded or can be compiled."""
        if not chip_name.startswith("cpu"):
            return f"the kernels run on CPUs, not on {chip_name}"
        if self.library.loaded:
            return None
        if self.library.reason is not None:
            return self.library.reason
        try:
            find_compiler()
            source_directory()
            selected_isa()
        except BuildError as error:
            return str(error)
        return None

    def implementation(self, name: str, variant: str, chip_name: str = "cpu") -> Implementation | None:
        """The kernel, which compiles the library when it is first asked whether it accepts a call."""
        found = KERNELS.get((name, variant))
        if found is None:
            return None
        accepts, make = found
        guarded = accepts if self.library.loaded else self._when_loaded(accepts)
        return Implementation(make(self.library), guarded, MEASURED)

    def prepare(self) -> None:
        """Compile and load now, so that calls bound afterwards need not ask whether that happened."""
        self.library.load()

    def _when_loaded(self, accepts: Accepts) -> Accepts:
        library = self.library

        def accepts_when_loaded(*arguments: Any) -> str | None:
            reason = accepts(*arguments)
            if reason is None and not library.loaded:
                return library.load()
            return reason

        return accepts_when_loaded
