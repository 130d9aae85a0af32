"""What a golden says of a step beside its records, found in the calls of a dump: tokens, positions, what followed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from porter.golden.importers.dump import Call, Held, Measured, Step

_POSITIONS = ("position_ids", "cache_position", "positions")
_TOKENS = "input_ids"


class RunFacts:
    """Follows the steps: a batch goes on where positions do not begin at 0 again."""

    def __init__(self) -> None:
        self.batch = -1
        self._past = 0

    def end_of(self, step: Step) -> dict[str, Any]:
        """``past_length``, ``tokens``, ``attention_mask`` and ``generated`` of the next step, for its end line."""
        tokens = step.tokens or _rows(_first(step, _TOKENS)) or _rows(_embedded(step))
        begin = _least(step) if step.begin is None else step.begin
        width = len(tokens[0]) if tokens else 0
        goes_on = self.batch >= 0 and (width == 1 if begin is None else begin > 0)
        self.batch += not goes_on
        past = self._past if goes_on else 0
        self._past = past + width
        return {
            # What is counted from the tokens may be 0 where they are unknown; the batch goes on all the same.
            "past_length": max(past, 1) if goes_on else 0,
            "tokens": tokens,
            "attention_mask": step.attention_mask or _rows(_first(step, "attention_mask")),
            "generated": step.generated or _greedy(step),
        }


def whole_call(step: Step, root: str) -> Iterator[Call]:
    """The call of the whole model, put together from its parts where the tool does not dump it: the arguments of the
    module that got the token ids, and the logits of `lm_head`."""
    if any(not call.module for call in step.calls):
        return
    heads = [call for call in step.calls if call.module == "lm_head"]
    bodies = [call for call in step.calls if _TOKENS in call.kwargs and "." not in call.module]
    if len(heads) == len(bodies) == 1:
        yield Call("", root, [], bodies[0].kwargs, {"logits": heads[0].output})


def _first(step: Step, name: str) -> Any:
    """The first argument of that name that is a tensor, of the outermost call."""
    for call in reversed(step.calls):
        value = call.kwargs.get(name)
        if isinstance(value, Tensor | Held | Measured) and not value.dtype.is_floating_point:
            return value
    return None


def _embedded(step: Step) -> Any:
    for call in step.calls:
        if call.module.rpartition(".")[2] == "embed_tokens" and call.args:
            return call.args[0]
    return None


def _tensor(value: Any) -> Tensor | None:
    if isinstance(value, Held):
        return value.read()
    return value if isinstance(value, Tensor) else None


def _rows(value: Any) -> list[list[int]] | None:
    tensor = _tensor(value)
    if tensor is None or tensor.dim() != 2 or tensor.is_floating_point():
        return None
    rows: list[list[int]] = tensor.to(torch.int64).tolist()
    return rows


def _least(step: Step) -> int | None:
    """The least position that any call was given."""
    named = (_first(step, name) for name in _POSITIONS)
    value = next((each for each in named if each is not None), None)
    if isinstance(value, Measured):
        least = value.stats["min"]
        return None if least is None else int(least)
    tensor = _tensor(value)
    return None if tensor is None or not tensor.numel() else int(tensor.min())


def _greedy(step: Step) -> list[int] | None:
    output = next((call.output for call in reversed(step.calls) if not call.module), None)
    logits = _tensor(output.get("logits")) if isinstance(output, dict) else None
    if logits is None or logits.dim() != 3:
        return None
    tokens: list[int] = logits[:, -1].argmax(dim=-1).tolist()
    return tokens
