"""Recorded calls keep what a meta kernel needs, and nothing is recorded twice."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.torch_npu_wheel import recording
from benchmarks.torch_npu_wheel.recording import Recorder, decoded, encoded, record_kernels
from porter.kernels.ascend import provider
from porter.kernels.ascend.catalogue.vendor_op import A2
from porter.kernels.ascend.emulator.stand_in import emulated_npu


def test_values_come_back_from_json() -> None:
    tensor = torch.empty(3, 5, dtype=torch.bfloat16).t()
    for value in (None, True, 3, 1e-6, float("inf"), "BSND", [1, 2], torch.int8, [tensor, None]):
        back = decoded(json.loads(json.dumps(encoded(value))), "meta")
        if isinstance(value, list) and value[0] is tensor:
            assert back[1] is None
            assert (back[0].shape, back[0].stride(), back[0].dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
            assert back[0].device.type == "meta"
        else:
            assert back == value and type(back) is type(value)


def test_what_no_operator_takes_is_refused() -> None:
    with pytest.raises(TypeError, match="object is no argument"):
        encoded(object())


def test_distinct_calls_are_kept_once() -> None:
    recorder = Recorder("test")
    with emulated_npu(A2) as emulator:
        import torch_npu

        emulator.observers.append(recorder)
        for rows, eps in ((2, 1e-6), (2, 1e-6), (3, 1e-6), (3, 1e-5)):
            torch_npu.npu_rms_norm(torch.ones(rows, 8), torch.ones(8), epsilon=eps)
    assert [(c["arguments"]["input"]["shape"], c["arguments"]["epsilon"]) for c in recorder.calls] == [
        ([2, 8], 1e-6),
        ([3, 8], 1e-6),
        ([3, 8], 1e-5),
    ]
    assert recorder.calls[0]["outputs"] == [encoded(torch.ones(2, 8)), encoded(torch.ones(2, 1))]
    again = Recorder("other")
    again.add(recorder.calls)
    again.add(recorder.calls)
    assert again.calls == recorder.calls


def test_a_kernel_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(torch_npu: object, *arguments: object) -> object:
        raise ZeroDivisionError("planted")

    monkeypatch.setitem(provider.KERNELS, ("rms_norm", "standard"), broken)
    monkeypatch.setattr(recording, "KERNELS", [("rms_norm", "standard")])
    (line,) = record_kernels(Recorder(), A2)
    assert line.startswith("kernel rms_norm/standard on ascend-910b, case ") and "ZeroDivisionError: planted" in line
