"""Calling models, and telling what they raise from what porter itself raises.

What stands between a module and its replay is its own affair: a kernel that takes no float64, arguments that it does
not know, a shape that does not fit. Any exception may say so, for models are anyone's code; so not its type tells, but
where it was raised. Between the call of a model and its return run also porter's own hooks and forced children: an
exception whose last frame of all known packages is porter's is a defect of porter, and shows itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from porter.errors import PorterError

Returned = TypeVar("Returned")

OWN = ("porter.alignment.", "porter.golden.")
"""Packages whose code runs beside a model. Ported models, kernels and the float64 mode are what is called."""

NO_MEMORY = ("can't allocate memory", "out of memory")
"""In torch's messages: whoever asks for memory last is not to blame that there is none."""


class CannotRun(Exception):
    """A model raised, or the device refused. The message is the reason in one short line, such as `TypeError: ...`;
    the exception itself is the cause."""


def called(model: Callable[..., Returned], *args: Any, **kwargs: Any) -> Returned:
    """`model(*args, **kwargs)`. Raises CannotRun for what the model raises; what porter raises meanwhile, as it is."""
    try:
        return model(*args, **kwargs)
    except (CannotRun, PorterError):
        raise
    except Exception as error:
        if _porters_own(error):
            raise
        raise CannotRun(line_of(error)) from error


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in float64. Raises CannotRun where its device has no float64, or no memory for it."""
    try:
        return tensor.to(torch.float64)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise CannotRun(line_of(error)) from error


def input_embeddings(module: nn.Module) -> nn.Module | None:
    """The embedding of tokens that a model says it has; None for a module that is no model, or has none."""
    get = getattr(module, "get_input_embeddings", None)
    try:
        found = get() if callable(get) else None
    except (NotImplementedError, AttributeError):  # transformers' way of saying that there are none
        return None
    return found if isinstance(found, nn.Module) else None


def line_of(error: BaseException) -> str:
    """An exception in one short line."""
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:160]}"


def _porters_own(error: Exception) -> bool:
    """Whether the innermost frame that is neither torch's nor Python's is porter's, of those below `called`."""
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
        return False
    frames = [*_frames(error.__traceback__)][1:]
    return next((_is_own(frame) for frame in reversed(frames) if not _is_library(frame)), False)


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(OWN)


def _is_library(frame: FrameType) -> bool:
    """Code that only does what the frame above asked it to: torch, and what comes with Python."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package == "torch" or package in sys.stdlib_module_names
