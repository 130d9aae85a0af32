"""Calling an Op: the chip's providers in order of preference, the reference last, every fallback counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from porter.kernels.contract import StrictFallback
from porter.kernels.library import register_library
from porter.kernels.providers import DEFAULT_CHIP, DEFAULT_PROVIDERS
from porter.kernels.registry import REFERENCE, OpRegistry, default_registry

GRADIENTS = "gradients are needed; run under torch.no_grad()"

# Anything else is fake, traced or wrapped, and must go through torch's dispatcher.
PLAIN = frozenset({torch.Tensor, nn.Parameter, int, float})

# Every nanosecond here is paid some 300 times a token: no attribute lookups on modules, no functions that call others.
_is_compiling = torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled

_Link = tuple[str, Callable[..., "str | None"], Callable[..., Any]]


class OpCall:
    """One place in a model that calls an Op.

    Plain tensors go straight to the first provider whose `accepts` returns None, else to the reference. Fake and meta
    tensors, and calls under torch.compile, go through `torch.ops.porter.<name>_<variant>`.

    `calls` counts calls by provider; `fallbacks` counts refusals by (provider, reason). Until `bind` is called, the
    order is that of the machine's CPU. Copies and pickles keep the binding, start counting anew, and are not forced to
    the reference; a pickle comes back on the default registry.
    """

    porter_op_call = True
    """Marks the class, so that an exported model's own copy of it is recognised too."""

    def __init__(self, name: str, variant: str, registry: OpRegistry | None = None) -> None:
        """Raises UnknownOp when there is no such Op."""
        self.name, self.variant = name, variant
        self.registry = default_registry() if registry is None else registry
        self.op = self.registry.op(name, variant)
        register_library(self.registry)
        self.site = ""
        self.chip_name = DEFAULT_CHIP
        self.providers: tuple[str, ...] = DEFAULT_PROVIDERS
        self.strict = False
        self.forced = False
        self.calls: dict[str, int] = {}
        self.fallbacks: dict[tuple[str, str], int] = {}
        self._chain: tuple[_Link, ...] | None = None

    def bind(self, chip_name: str, providers: Sequence[str], strict: bool = False, site: str = "") -> None:
        """Use `providers`, in this order, on `chip_name`; the reference comes last whether named or not.

        An order without any provider but the reference chooses the reference, which is no fallback. Raises
        StrictFallback when `strict` and none of the providers named has a kernel for this Op on this chip.
        """
        self.chip_name, self.providers, self.strict, self.site = chip_name, tuple(providers), strict, site
        self.reset_counts()
        self._chain = None
        self._resolve()

    def reset_counts(self) -> None:
        """Count from zero again."""
        self.calls, self.fallbacks = {}, {}

    def preferred(self) -> str:
        """The provider that is asked first: "reference" when no other has a kernel, or when it is forced."""
        chain = self._resolve()
        return chain[0][0] if chain and not self.forced else REFERENCE

    def force_reference(self, forced: bool) -> bool:
        """Use the reference alone, or stop doing so; returns what was set before."""
        before, self.forced = self.forced, forced
        return before

    def __call__(self, *arguments: Any) -> Any:
        """The Op's outputs for the positional `arguments` of its schema."""
        if _is_compiling() or type(arguments[0]) not in PLAIN:
            return self._traced(arguments)
        chain = self._chain
        if chain is None:
            chain = self._resolve()
        if self.forced:
            return self._call_reference(arguments)
        if _is_grad_enabled() and _needs_gradients(arguments):
            return self._with_gradients(chain, arguments)
        for provider, accepts, call in chain:
            reason = accepts(*arguments)
            if reason is None:
                calls = self.calls
                calls[provider] = calls.get(provider, 0) + 1
                return call(*arguments)
            if _is_meta(arguments):
                break
            self._refuse(provider, reason)
        return self._call_reference(arguments)

    def _with_gradients(self, chain: tuple[_Link, ...], arguments: tuple[Any, ...]) -> Any:
        if not _is_meta(arguments):
            for provider, _, _ in chain:
                self._refuse(provider, GRADIENTS)
        return self._call_reference(arguments)

    def _call_reference(self, arguments: tuple[Any, ...]) -> Any:
        if _is_meta(arguments):
            return self._operator(arguments)
        self.calls[REFERENCE] = self.calls.get(REFERENCE, 0) + 1
        return self.op.reference(*arguments)

    def _traced(self, arguments: tuple[Any, ...]) -> Any:
        if _is_compiling() and (self.forced or (_is_grad_enabled() and _needs_gradients(arguments))):
            return self.op.reference(*arguments)
        return self._operator(arguments)

    def _operator(self, arguments: tuple[Any, ...]) -> Any:
        return getattr(torch.ops.porter, self.op.qualified)(*arguments)

    def _resolve(self) -> tuple[_Link, ...]:
        if self._chain is None:
            resolution = self.registry.resolve(self.name, self.variant, self.chip_name, self.providers)
            self._chain = tuple((name, i.accepts, i.call) for name, i in resolution.implementations)
            if not self._chain:
                for provider, reason in resolution.refused.items():
                    self._refuse(provider, reason)
        return self._chain

    def _refuse(self, provider: str, reason: str) -> None:
        if self.strict:
            place = f" at {self.site}" if self.site else ""
            raise StrictFallback(
                f"{self.name}/{self.variant}{place}: provider {provider} on {self.chip_name} refuses: {reason}"
            )
        key = provider, reason
        self.fallbacks[key] = self.fallbacks.get(key, 0) + 1

    def __getstate__(self) -> dict[str, Any]:
        names = ("name", "variant", "site", "chip_name", "providers", "strict")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["name"], state["variant"])  # type: ignore[misc]
        self.__dict__.update(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> OpCall:
        twin = type(self)(self.name, self.variant, self.registry)
        twin.__dict__.update(self.__getstate__())
        twin._chain = self._chain
        return twin

    def __repr__(self) -> str:
        place = f", site={self.site!r}" if self.site else ""
        return f"OpCall({self.name}/{self.variant}, {' > '.join((*self.providers, REFERENCE))}{place})"


def _needs_gradients(arguments: tuple[Any, ...]) -> bool:
    return any(isinstance(a, torch.Tensor) and a.requires_grad for a in arguments)


def _is_meta(arguments: tuple[Any, ...]) -> bool:
    first = arguments[0]
    return isinstance(first, torch.Tensor) and first.is_meta


def op_calls(model: nn.Module) -> list[tuple[str, OpCall]]:
    """(site, OpCall) for each OpCall that a module of `model` holds; a site is "module.path.attribute".

    Recognises the OpCalls of an exported model, whose class is a copy of this one.
    """
    return [
        (f"{path}.{attribute}" if path else attribute, value)
        for path, module in model.named_modules()
        for attribute, value in vars(module).items()
        if getattr(type(value), "porter_op_call", False)
    ]


def bind_model(
    model: nn.Module,
    chip_name: str,
    providers: Sequence[str] = DEFAULT_PROVIDERS,
    *,
    strict: bool = False,
    reference_only: Sequence[str] = (),
) -> None:
    """Bind every OpCall of `model` and name its site.

    Ops in `reference_only` ("rms_norm" or "rms_norm/standard") use the reference by choice. Raises StrictFallback, see
    `OpCall.bind`.
    """
    for site, call in op_calls(model):
        chosen = {call.name, f"{call.name}/{call.variant}"} & set(reference_only)
        call.bind(chip_name, () if chosen else providers, strict=strict, site=site)


def usage(model: nn.Module) -> list[dict[str, Any]]:
    """What served each site so far: rows {site, op, variant, provider, calls, fallbacks}, one per site and provider.

    A site that was not called has one row with the provider that would be asked first and 0 calls. `fallbacks` is a
    list of {provider, reason, calls}.
    """
    rows = []
    for site, call in op_calls(model):
        fallbacks = [{"provider": p, "reason": r, "calls": n} for (p, r), n in call.fallbacks.items()]
        for provider, calls in (call.calls or {call.preferred(): 0}).items():
            row = {"site": site, "op": call.name, "variant": call.variant, "provider": provider, "calls": calls}
            rows.append({**row, "fallbacks": fallbacks})
    return rows


@contextmanager
def using_reference(model: nn.Module) -> Iterator[None]:
    """Force the reference on every OpCall of `model` inside the context."""
    before = [(call, call.force_reference(True)) for _, call in op_calls(model)]
    try:
        yield
    finally:
        for call, forced in before:
            call.force_reference(forced)
