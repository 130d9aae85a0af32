"""Run code that hard-codes float32 in float64 instead, inside a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NARROWER = frozenset({torch.float32, torch.float16, torch.bfloat16})


class _Float64Dispatch(TorchDispatchMode):
    """Rewrites every `dtype=` narrower than float64 that reaches the dispatcher."""

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Any,
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:
        keywords = dict(keywords or {})
        if keywords.get("dtype") in NARROWER:
            keywords["dtype"] = torch.float64
        return function(*arguments, **keywords)


@contextmanager
def float64_mode() -> Iterator[None]:
    """Keep float64 through `.to(torch.float32)`, `.float()` and `softmax(dtype=torch.float32)`.

    Upstream's modelling code upcasts norms, rope, routers and softmax to float32 by name; on a float64 model that is a
    rounding to 2^-24, which hides any fault smaller than it. Tensors that the code creates without a dtype become
    float64 too. Integer and boolean tensors are left alone.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        # Inference mode hides from the dispatcher the casts that it must rewrite.
        with torch.inference_mode(False), torch.no_grad(), _Float64Dispatch():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(default)
