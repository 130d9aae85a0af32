"""The Ops and providers that are known, as one object that is built when asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from porter.kernels.contract import Implementation, Op, Provider, UnknownOp
from porter.kernels.providers import make_providers
from porter.kernels.reference.activation import OPS as ACTIVATION
from porter.kernels.reference.attention import OPS as ATTENTION
from porter.kernels.reference.causal_conv1d import OPS as CAUSAL_CONV1D
from porter.kernels.reference.clamped_experts import OPS as CLAMPED_EXPERTS
from porter.kernels.reference.compressor import OPS as COMPRESSOR
from porter.kernels.reference.delta_rule import OPS as DELTA_RULE
from porter.kernels.reference.experts import OPS as EXPERTS
from porter.kernels.reference.experts_w4a8 import OPS as EXPERTS_W4A8
from porter.kernels.reference.gates import OPS as GATES
from porter.kernels.reference.grouped_linear import OPS as GROUPED_LINEAR
from porter.kernels.reference.grouped_softmax import OPS as GROUPED_SOFTMAX
from porter.kernels.reference.hyper_connection import OPS as HYPER_CONNECTION
from porter.kernels.reference.indexer import OPS as INDEXER
from porter.kernels.reference.linear import OPS as LINEAR
from porter.kernels.reference.linear_static import OPS as LINEAR_STATIC
from porter.kernels.reference.mla_attention import OPS as MLA_ATTENTION
from porter.kernels.reference.norm import OPS as NORM
from porter.kernels.reference.rope import OPS as ROPE
from porter.kernels.reference.rope_frequencies import OPS as ROPE_FREQUENCIES
from porter.kernels.reference.router import OPS as ROUTER
from porter.kernels.reference.sampling import OPS as SAMPLING
from porter.kernels.reference.score_router import OPS as SCORE_ROUTER
from porter.kernels.reference.sink_attention import OPS as SINK_ATTENTION
from porter.kernels.reference.sparse_mla_attention import OPS as SPARSE_MLA_ATTENTION
from porter.kernels.reference.variable_length import OPS as VARIABLE_LENGTH

REFERENCE = "reference"


@dataclass(frozen=True)
class Resolution:
    """What serves an Op on a chip: the implementations in order of preference, and why other providers do not."""

    implementations: tuple[tuple[str, Implementation], ...]
    refused: dict[str, str]


@dataclass
class OpRegistry:
    """Ops by (name, variant) and providers by name. `library` holds what torch knows of them, once registered."""

    ops: dict[tuple[str, str], Op] = field(default_factory=dict)
    providers: dict[str, Provider] = field(default_factory=dict)
    library: torch.library.Library | None = None

    @staticmethod
    def of(ops: Iterable[Op], providers: Iterable[Provider] = ()) -> OpRegistry:
        """A registry of these. Raises ValueError where two Ops or two providers share a name."""
        registry = OpRegistry()
        for op in ops:
            if op.key in registry.ops:
                raise ValueError(f"two Ops are named {op.name}/{op.variant}")
            registry.ops[op.key] = op
        for provider in providers:
            if provider.name in registry.providers or provider.name == REFERENCE:
                raise ValueError(f"two providers are named {provider.name}")
            registry.providers[provider.name] = provider
        return registry

    def op(self, name: str, variant: str) -> Op:
        """The Op. Raises UnknownOp naming the variants that exist."""
        try:
            return self.ops[name, variant]
        except KeyError:
            variants = sorted(v for n, v in self.ops if n == name)
            known = f"{name} has {', '.join(variants)}" if variants else f"Ops: {', '.join(sorted({*self.names()}))}"
            raise UnknownOp(f"no Op {name}/{variant}; {known}") from None

    def names(self) -> list[str]:
        """Op names without variants, in order of registration."""
        return list(dict.fromkeys(name for name, _ in self.ops))

    def resolve(self, name: str, variant: str, chip_name: str, providers: Sequence[str]) -> Resolution:
        """Which of `providers`, in this order, implement the Op on the chip, judged without any arguments."""
        self.op(name, variant)
        implementations, refused = [], {}
        for provider_name in providers:
            if provider_name == REFERENCE:
                continue
            provider = self.providers.get(provider_name)
            if provider is None:
                refused[provider_name] = "no such provider is installed"
            elif (reason := provider.supported(chip_name)) is not None:
                refused[provider_name] = reason
            elif (implementation := provider.implementation(name, variant, chip_name)) is None:
                refused[provider_name] = f"has no kernel for {name}/{variant}"
            else:
                implementations.append((provider_name, implementation))
        return Resolution(tuple(implementations), refused)

    def undocumented(
        self, name: str, variant: str, chip_name: str, provider_name: str, dtype: torch.dtype
    ) -> str | None:
        """Why the vendor's documents allow no case of the Op on the chip in `dtype`; None where they allow one.

        Asked of providers that can tell the calls they would make (`calls`); the others are asked when they run.
        """
        tell = getattr(self.providers[provider_name], "calls", None)
        op, reason = self.op(name, variant), None
        if tell is None or dtype not in op.dtypes:
            return None
        for case in op.inputs(dtype):
            if any(isinstance(a, torch.Tensor) and not a.numel() for a in case.arguments):
                continue  # Kernels return at once from nothing, on any chip.
            reason, _ = tell(name, variant, chip_name, case.arguments)
            if reason is None:
                return None
        return reason


@cache
def default_registry() -> OpRegistry:
    """Every Op and provider that porter ships, built on the first call and shared after it."""
    ops = (
        *NORM,
        *ROPE,
        *ROPE_FREQUENCIES,
        *ACTIVATION,
        *LINEAR,
        *LINEAR_STATIC,
        *GROUPED_LINEAR,
        *ATTENTION,
        *VARIABLE_LENGTH,
        *SINK_ATTENTION,
        *MLA_ATTENTION,
        *INDEXER,
        *SPARSE_MLA_ATTENTION,
        *ROUTER,
        *GROUPED_SOFTMAX,
        *SCORE_ROUTER,
        *EXPERTS,
        *EXPERTS_W4A8,
        *CLAMPED_EXPERTS,
        *COMPRESSOR,
        *HYPER_CONNECTION,
        *CAUSAL_CONV1D,
        *GATES,
        *DELTA_RULE,
        *SAMPLING,
    )
    return OpRegistry.of(ops, make_providers())
