"""The short causal convolution of linear attention padded on the wrong side, or by the wrong number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.anatomy import recurrences
from porter.alignment.hypotheses.surgery import forward_function, names_global, rebind_globals
from porter.alignment.hypotheses.trial import Change, Trial, TrialHypothesis

PREFILL, UPDATE = "causal_conv1d_fn", "causal_conv1d_update"


def _shifted(amount: int) -> Callable[..., torch.Tensor]:
    """The causal convolution with its input moved by `amount` tokens (positive: later ones reach a token)."""

    def convolve(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        return _convolved(hidden_states, weight, bias, activation, weight.shape[-1] - 1 - amount, amount)

    return convolve


def _replicated(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    before = hidden_states[..., :1].expand(*hidden_states.shape[:-1], weight.shape[-1] - 1)
    whole = torch.cat((before, hidden_states), dim=-1)
    return _convolved(whole, weight, bias, activation, 0, 0)


def _convolved(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    before: int,
    after: int,
) -> torch.Tensor:
    from transformers.activations import ACT2FN

    padded = nn.functional.pad(hidden_states, (before, after))
    out = nn.functional.conv1d(padded, weight.unsqueeze(1), bias, groups=weight.shape[0])
    return out if activation is None else torch.as_tensor(ACT2FN[activation](out))


def _prefill(path: str, convolve: Callable[..., torch.Tensor]) -> Change:
    return lambda module: rebind_globals(module.get_submodule(path), {PREFILL: convolve})


def _reversed(path: str, mixer: nn.Module) -> Change:
    def flipped(original: Callable[..., torch.Tensor], at: int) -> Callable[..., torch.Tensor]:
        def convolve(*args: Any, **kwargs: Any) -> torch.Tensor:
            turned = list(args)
            turned[at] = args[at].flip(-1)
            return original(*turned, **kwargs)

        return convolve

    names = forward_function(mixer).__globals__
    replaced = {PREFILL: flipped(names[PREFILL], 1), UPDATE: flipped(names[UPDATE], 2)}
    return lambda module: rebind_globals(module.get_submodule(path), replaced)


def _late_update(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A decode step that convolves a window one token too old."""

    def update(hidden_states: torch.Tensor, conv_state: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        aged = torch.cat((torch.zeros_like(conv_state[..., :1]), conv_state[..., :-1]), dim=-1)
        out = original(hidden_states, aged, *rest, **options)
        conv_state.copy_(torch.cat((conv_state, hidden_states), dim=-1)[..., -conv_state.shape[-1] :])
        return out

    return update


def _trials(drift: Drift) -> Iterator[Trial]:
    for path, mixer in recurrences(drift.source_module, drift.forced):
        if not names_global(mixer, PREFILL):
            continue
        taps = int(getattr(mixer, "conv_kernel_size", 4))
        for amount in (*range(1, taps), -1):
            side = f"sees {amount} tokens of the future" if amount > 0 else "lags by one token"
            says = f"The causal convolution {side}: pad {taps - 1} zeros before the first token and none after the last"
            yield Trial("conv-padding", says, _prefill(path, _shifted(amount)), part=path)
        says = "The convolution repeats the first token before it: pad with zeros"
        yield Trial("conv-padding", says, _prefill(path, _replicated), part=path)
        says = "The taps of the convolution are in reverse order: the last one belongs to the current token"
        yield Trial("conv-padding", says, _reversed(path, mixer), part=path)
        if names_global(mixer, UPDATE):
            late = _late_update(forward_function(mixer).__globals__[UPDATE])
            says = "Decode steps convolve a window that is one token too old: shift the state before it is read"
            yield Trial(
                "conv-padding",
                says,
                lambda module, path=path, late=late: rebind_globals(module.get_submodule(path), {UPDATE: late}),  # type: ignore[misc]
                part=path,
            )


HYPOTHESIS = TrialHypothesis(("conv-padding",), _trials)
