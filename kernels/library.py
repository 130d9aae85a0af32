"""The Ops as torch.library operators, so that fake and meta tensors, torch.compile and torch.export see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from porter.kernels.contract import Op
from porter.kernels.providers import DEFAULT_CHIP, DEFAULT_PROVIDERS
from porter.kernels.registry import OpRegistry

NAMESPACE = "porter"


def register_library(registry: OpRegistry) -> None:
    """Define `torch.ops.porter.<name>_<variant>` for each Op of `registry`, once.

    The operator runs the first provider of the default order that accepts the arguments, else the reference; a
    compiled graph keeps no counts. An operator that is defined already, by another registry or by an exported model's
    copy of this code, is kept when its schema is the same. Raises RuntimeError when it is not.
    """
    if registry.library is not None:
        return
    registry.library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for op in registry.ops.values():
        if not _defined(op):
            _define(op, registry, registry.library)


def _defined(op: Op) -> bool:
    packet = getattr(getattr(torch.ops, NAMESPACE), op.qualified, None)
    if packet is None:
        return False
    wanted = torch._C.parse_schema(f"{NAMESPACE}::{op.qualified}{op.schema}")
    if packet.default._schema != wanted:
        raise RuntimeError(
            f"another version of porter defined torch.ops.{NAMESPACE}.{op.qualified} as {packet.default._schema}; "
            f"this one needs {wanted}: load the two in separate processes"
        )
    return True


def _define(op: Op, registry: OpRegistry, library: torch.library.Library) -> None:
    qualified = f"{NAMESPACE}::{op.qualified}"
    library.define(op.qualified + op.schema)
    implementation = _implementation(op, registry)
    library.impl(op.qualified, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(qualified, op.fake, lib=library)


def _implementation(op: Op, registry: OpRegistry) -> Callable[..., Any]:
    chain: list[tuple[Callable[..., str | None], Callable[..., Any]]] = []
    resolved = False

    def implementation(*arguments: Any) -> Any:
        nonlocal resolved
        if not resolved:
            found = registry.resolve(op.name, op.variant, DEFAULT_CHIP, DEFAULT_PROVIDERS).implementations
            chain.extend((i.accepts, i.call) for _, i in found)
            resolved = True
        for accepts, call in chain:
            if accepts(*arguments) is None:
                return call(*arguments)
        return op.reference(*arguments)

    return implementation
