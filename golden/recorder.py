"""Recording a model's forwards into a golden."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from porter.errors import PorterError
from porter.golden.environment import environment, place_in_group
from porter.golden.format import DETAILS, dtype_name
from porter.golden.module_hooks import Recorder, compile_pattern
from porter.golden.native import measured_by
from porter.golden.sketch import SEED
from porter.golden.unseen import COMPILED, compiled_forward, why_not_hooked
from porter.golden.weights import StoreWeights, describe_model, write_weights
from porter.golden.writer import Writer


def check_request(detail: str, modules: str | None) -> None:
    """PorterError for a detail that does not exist or a pattern that is not a regular expression."""
    if detail not in DETAILS:
        raise PorterError(f"--detail is {detail!r}, expected one of {', '.join(DETAILS)}")
    compile_pattern(modules)


def header(
    model: nn.Module, detail: str, modules: str | None, prompts: Sequence[str] | None, store_weights: StoreWeights
) -> dict[str, Any]:
    """What a golden's header says before anything runs; PorterError for what cannot be recorded."""
    check_request(detail, modules)
    why = why_not_hooked(model) or (COMPILED if compiled_forward(model) else None)
    if why is not None:
        raise PorterError(f"{type(model).__name__} cannot be recorded: it is {why}; record the eager model")
    parameter = next((tensor for tensor in model.parameters() if tensor.is_floating_point()), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    return {
        "detail": detail,
        "dtype": None if parameter is None else dtype_name(parameter.dtype),
        "device": str(device),
        "model": describe_model(model, store_weights),
        "environment": environment(device) | {"measured_by": measured_by()},
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "modules": modules,
        "prompts": None if prompts is None else list(prompts),
        "new_tokens": 0,
        "sketch_seed": SEED,
        **place_in_group(),
    }


@contextmanager
def recording(
    model: nn.Module,
    path: str | Path,
    *,
    detail: str = "full",
    modules: str | None = None,
    prompts: Sequence[str] | None = None,
    store_weights: StoreWeights = "auto",
) -> Iterator[Recorder]:
    """Record every forward of ``model`` inside the ``with`` block into a new golden at ``path``.

    ``detail`` is ``full``, ``sketch`` or ``stats``; ``modules`` a regular expression searched for in module names;
    ``prompts`` is kept in the manifest. The hooks are gone when the block ends, however it ends. After an exception the
    golden stays incomplete and opens with what was recorded. PorterError if the model cannot be hooked, if ``path``
    holds something, or if no hooked module was called.
    """
    writer = Writer(path, header(model, detail, modules, prompts, store_weights))
    if writer.header["model"]["weights"]:
        write_weights(writer.path, model, writer.header["model"]["tied"])
    with attached(model, writer) as recorder:
        yield recorder
        recorder.settle()
        if not writer.records_written:
            raise PorterError(f"{writer.path}: nothing to record: no module that matches was called")
        if not writer.ends:
            no_root = {"step": 0, "past_length": 0, "tokens": None, "attention_mask": None, "generated": None}
            writer.end_step(no_root)
        writer.finish(recorder.produced())


@contextmanager
def attached(model: nn.Module, writer: Writer) -> Iterator[Recorder]:
    """A recorder that writes to ``writer`` as long as the block runs; the writer is flushed in any case."""
    recorder = Recorder(model, writer, writer.header["detail"], writer.header["modules"])
    try:
        recorder.attach()
        yield recorder
    finally:
        recorder.detach()
        writer.close()
