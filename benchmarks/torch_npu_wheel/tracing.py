"""An exported Ascend model on `npu` tensors without values: the branch that the chip takes, down to the vendor's metas.

What it shows that the emulator on CPU tensors cannot: a tensor made on another device than `npu`, and an operator that
reads values back to the host, which would stop the chip in every step.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.torch_npu_wheel.generation import chip_of
from benchmarks.torch_npu_wheel.replay import as_chip, first_line

BATCH, PROMPT = 2, 7


class ChiplessMode(FakeTensorMode):
    """Fake tensors on `npu` without setting up the device: constants are made on the CPU and then called `npu`."""

    avoid_device_init = True


class _Counted(TorchDispatchMode):
    """Counts the operators of torch_npu."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "npu":
            self.calls.update([func._schema.name.removeprefix("npu::")])
        return func(*args, **(kwargs or {}))


def traced(directory: Path, metas: Any) -> dict[str, Any]:
    """The prefill of a batch and one decoding step of the model of `directory` on fake `npu` tensors.

    "calls": how often each operator of torch_npu was called; "logits": shapes, dtypes and devices of the two results;
    "refused": the Ops that the reference served, and why; "stopped": what ended it before, or None.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True, dtype=config.dtype).eval()
    counted, logits, stopped = _Counted(), [], None
    calls = list(_op_calls(model))
    with as_chip(metas, chip_of(directory)), taken_for_plain(calls), ChiplessMode(), counted, torch.no_grad():
        _to_npu(model)
        ids = torch.zeros(BATCH, PROMPT, dtype=torch.long, device="npu")
        try:
            prefill = model(input_ids=ids, use_cache=True)
            decode = model(input_ids=ids[:, :1], cache=prefill.past_key_values, use_cache=True)
            logits = [[list(o.logits.shape), str(o.logits.dtype), o.logits.device.type] for o in (prefill, decode)]
        except Exception as error:  # whatever stops a port on npu tensors is what is reported
            stopped = first_line(error)
    refused = sorted({f"{c.name}/{c.variant}: {reason}" for c in calls for _, reason in c.fallbacks})
    return {"calls": dict(sorted(counted.calls.items())), "logits": logits, "refused": refused, "stopped": stopped}


@contextmanager
def taken_for_plain(calls: list[Any]) -> Iterator[None]:
    """Inside, `calls` (OpCalls) give fake tensors to the chip's kernels, as they do plain ones. What a kernel refuses
    goes to the Op's fake: a reference may choose by values, which fake tensors have not."""
    modules = {sys.modules[type(call).__module__] for call in calls}
    before = {module: module.PLAIN for module in modules}
    for module, plain in before.items():
        module.PLAIN = plain | {FakeTensor}
    for call in calls:
        call._call_reference = call._operator
    try:
        yield
    finally:
        for module, plain in before.items():
            module.PLAIN = plain
        for call in calls:
            del call._call_reference


def _op_calls(model: torch.nn.Module) -> Iterator[Any]:
    for module in model.modules():
        yield from (value for value in vars(module).values() if getattr(type(value), "porter_op_call", False))


def _to_npu(model: torch.nn.Module) -> None:
    """Replace parameters and buffers: torch_npu's own Module.to swaps tensors, which fake ones do not allow."""
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                module._parameters[name] = torch.nn.Parameter(_empty(value), requires_grad=False)
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = _empty(value)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="npu")
