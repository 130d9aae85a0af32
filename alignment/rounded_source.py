"""The source in the precision of a recording: what that precision does to the weights is no fault of the modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from porter.alignment.precision_swap import swapped
from porter.alignment.stream import Stream, placeholder_of
from porter.alignment.streaming import stream_of

KEPT_WIDE = 1 << 22
"""Elements of the largest parameter that a port may keep wider than its dtype: norms, biases, routers."""


@dataclass(frozen=True)
class RoundedSource:
    """What rounding took from a source's parameters, of those that a port may keep as they were: the parameters by the
    identity of the rounded ones, or by name the placeholders of a streamed source, whose files still hold them."""

    parameters: Mapping[int, Tensor]
    stream: Stream | None = None
    placeholders: Mapping[str, Tensor] | None = None

    @contextmanager
    def unrounded(self, module: nn.Module) -> Iterator[None]:
        """The module of the source as if those had been kept, while the context lasts."""
        if self.stream is None:
            with swapped(module, lambda tensor: self.parameters.get(id(tensor), tensor)):
                yield
            return
        with self.stream.held_as(self.placeholders or {}):
            yield


def round_to(source: nn.Module, dtype: torch.dtype) -> RoundedSource:
    """Round the parameters of `source` to `dtype`, in place, where it is coarser than theirs."""
    stream = stream_of(source)
    if stream is not None:
        return _round_streamed(stream, dtype)
    wide = {}
    for module in source.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and _finer(parameter, dtype):
                rounded = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                module._parameters[name] = rounded
                if parameter.numel() <= KEPT_WIDE:
                    wide[id(rounded)] = parameter.detach()
    return RoundedSource(wide)


def _round_streamed(stream: Stream, dtype: torch.dtype) -> RoundedSource:
    wide = {name: p for name, p in stream.placeholders.items() if isinstance(p, nn.Parameter) and _finer(p, dtype)}
    rounded: dict[int, Tensor] = {}
    for name, parameter in wide.items():
        if id(parameter) not in rounded:
            rounded[id(parameter)] = placeholder_of(parameter.detach().to(dtype), parameter)
        stream.placeholders[name] = rounded[id(parameter)]
    stream.release()
    kept = {name: parameter for name, parameter in wide.items() if parameter.numel() <= KEPT_WIDE}
    return RoundedSource({}, stream, kept)


def _finer(parameter: Tensor, dtype: torch.dtype) -> bool:
    return torch.finfo(parameter.dtype).eps < torch.finfo(dtype).eps
