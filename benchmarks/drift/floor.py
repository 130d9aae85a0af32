"""How far a fault moves its module, in units of the module's own rounding noise; computed without porter.

Every module gets the inputs that it gets in a float64 run of the healthy candidate, prompt and decode steps, so an
error is the module's own. The noise is what the healthy module loses in the candidate's dtype.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

Calls = list[tuple[list[Any], list[Tensor]]]


def excess(healthy: Any, faulty: Any, module: str, tokens: Tensor, mask: Tensor, generated: Tensor) -> float:
    """The fault's error over the noise: the largest of every output tensor and call, infinite where not finite."""
    quantized = any(p.dtype == torch.int8 for p in healthy.parameters())
    oracle = healthy if quantized else _double(healthy)
    given = _run(oracle, module, tokens, mask, generated, None)
    noise = _run(healthy, module, tokens, mask, generated, given)
    error = _run(faulty, module, tokens, mask, generated, given)
    worst = 0.0
    for (_, exact), (_, rounded), (_, wrong) in zip(given, noise, error, strict=True):
        for a, b, c in zip(exact, rounded, wrong, strict=False):
            floor = max(_relative(b, a), torch.finfo(b.dtype).eps / 2)
            found = _relative(c, a) / floor
            worst = max(worst, found if math.isfinite(found) else math.inf)
    return worst


def _double(model: Any) -> Any:
    """A float64 copy; grouped products have no float64, so experts run one after another."""
    wide = copy.deepcopy(model).double()
    if getattr(wide.config, "_experts_implementation", None) is not None:
        wide.set_experts_implementation("eager")
    return wide


def _run(model: Any, module: str, tokens: Tensor, mask: Tensor, generated: Tensor, given: Calls | None) -> Calls:
    """(inputs, outputs) of every call of the module; its floating inputs are replaced by those of `given`."""
    from transformers import DynamicCache

    calls: Calls = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        flat = [*_floats(args), *_floats({k: v for k, v in kwargs.items() if "mask" not in k})]
        calls.append(([t.detach().clone() for t in flat], []))
        if given is None:
            return None
        feed = iter(given[len(calls) - 1][0])
        args = _replaced(args, feed)
        return args, {k: v if "mask" in k else _replaced(v, feed) for k, v in kwargs.items()}

    def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls[-1][1].extend(t.detach().clone() for t in _floats(output))

    target = model.get_submodule(module)
    handles = [
        target.register_forward_pre_hook(before, with_kwargs=True),
        target.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        with torch.no_grad():
            cache, seen = DynamicCache(config=model.config), mask
            step = tokens
            for index in range(generated.shape[1]):
                positions = (seen.cumsum(1) - 1).clamp(min=0)[:, -step.shape[1] :]
                model(input_ids=step, attention_mask=seen, position_ids=positions, cache=cache, use_cache=True)
                step = generated[:, index : index + 1]
                seen = torch.cat([seen, seen.new_ones(len(seen), 1)], dim=1)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _floats(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() or value.is_complex() else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in _floats(item)]


def _replaced(value: Any, feed: Any) -> Any:
    if isinstance(value, Tensor):
        return next(feed).to(value.dtype) if value.is_floating_point() or value.is_complex() else value
    if isinstance(value, dict):
        return {key: _replaced(item, feed) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_replaced(item, feed) for item in value])
    return value


def _relative(value: Tensor, exact: Tensor) -> float:
    wide = torch.complex128 if exact.is_complex() else torch.float64
    difference, scale = float((value.to(wide) - exact.to(wide)).norm()), float(exact.to(wide).norm())
    return difference / scale if scale else (math.inf if difference else 0.0)
