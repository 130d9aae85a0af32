"""Using a model whether it is streamed or in memory: what is needed of it is there while it is needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from porter.alignment.stream import PLACE, Stream, placeholder_of, put_back


def stream_of(model: nn.Module) -> Stream | None:
    """The stream of a streamed model; None for one that is in memory."""
    place = model.__dict__.get(PLACE)
    return None if place is None else place.stream


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The streamed `model` in `dtype`, as `Module.to` would give it."""
    stream = stream_of(model)
    assert stream is not None, "only streamed models are cast here"
    for name, placeholder in stream.placeholders.items():
        if placeholder.is_floating_point():
            stream.placeholders[name] = placeholder_of(placeholder.detach().to(dtype), placeholder)
    for owner in model.modules():
        for leaf, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.is_floating_point():
                owner._buffers[leaf] = buffer.to(dtype)
    stream.release()
    return model


def reach(model: nn.Module | None, name: str) -> None:
    """`Stream.reach` for a streamed model; nothing for one in memory, or none."""
    stream = None if model is None else stream_of(model)
    if stream is not None:
        stream.reach(name)


def release(*models: nn.Module | None) -> None:
    """`Stream.release` for those that are streamed."""
    for model in models:
        stream = None if model is None else stream_of(model)
        if stream is not None:
            stream.release()


@contextmanager
def present(module: nn.Module) -> Iterator[None]:
    """What `module` needs to run is in memory while the context lasts; nothing to do for one that is not streamed."""
    place = module.__dict__.get(PLACE)
    filled = [] if place is None else place.stream.fill(module)
    try:
        yield
    finally:
        put_back(filled)


@contextmanager
def kept(model: nn.Module, available: int) -> Iterator[None]:
    """Where the whole model fits into `available` bytes, what calls bring in stays until the context ends."""
    stream = stream_of(model)
    if stream is None:
        yield
        return
    stream.release()
    stream.keep = stream.nbytes <= available
    try:
        yield
    finally:
        stream.keep = False
        stream.release()


class Tensors(Mapping[str, Tensor]):
    """Parameters and buffers of a model by name, those of a streamed model read when they are asked for.

    `names`: only these. `shapes` has them with their dtypes and shapes, perhaps as placeholders.
    """

    def __init__(self, model: nn.Module, names: Iterable[str] | None = None) -> None:
        self.stream = stream_of(model)
        named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        wanted = named if names is None else names
        self.shapes: dict[str, Tensor] = {name: named[name].detach() for name in wanted}

    def __getitem__(self, name: str) -> Tensor:
        held = self.shapes[name]
        if self.stream is None or name not in self.stream.placeholders:
            return held
        return self.stream.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def own(self, name: str) -> Tensor:
        """The model's own tensor, whatever it has adopted."""
        if self.stream is None or name not in self.stream.placeholders:
            return self.shapes[name]
        return self.stream.load(name).to(self.stream.device, self.shapes[name].dtype)
