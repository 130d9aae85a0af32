"""Within rounding noise: faults of kernels are still named when the candidate runs in its own precision."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from module_faults import FAULTS
from small_modules import drift_of

from porter.alignment.drift import Drift
from porter.alignment.hypotheses.catalogue import explain
from porter.alignment.observation import worst

NOISE, FLOOR = 2e-3, 4e-3
"""Relative rounding noise of a bf16 module, and the budget of twice as much that a replay allows it."""
KERNEL_FAULTS = (
    "rope interleaved for half", "rope half for interleaved", "gelu", "norm left out", "attention scale by a little",
    "yarn mscale left out", "output times 1.5", "output plus a constant",
    "key/value heads tiled", "router bias left out", "router bias leaked", "router scale left out",
    "router groups by their best", "shared expert left out", "first residual left out",
    "no causal mask", "mask off by one", "stray sliding window",
)  # fmt: skip


def in_native_lane(drift: Drift, noise: float = NOISE) -> Drift:
    """The same drift with rounding noise on every tensor of the candidate, and nothing to see in the weights."""
    generator = torch.Generator().manual_seed(9)

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        drawn = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        return tensor + noise * tensor.norm() / tensor.numel() ** 0.5 * drawn

    found = [{label: rounded(tensor) for label, tensor in seen.items()} for seen in drift.candidate_output]
    tensor, before, step = worst(found, drift.source_output)
    return dataclasses.replace(
        drift,
        candidate_output=found,
        lane="native",
        floor=FLOOR,
        weights={},
        tensor=tensor,
        before=before,
        step=step,
        run_candidate=None,
    )


@pytest.mark.parametrize("name", KERNEL_FAULTS)
def test_kernel_fault_is_named_through_the_noise(name: str) -> None:
    fault = FAULTS[name]
    drift = in_native_lane(drift_of(fault.family, fault.path, fault.plant))
    assert drift.before > 2 * FLOOR, "a fault below twice the floor is no drift"
    first = explain(drift)[0]
    assert first.kind == fault.kind
    assert first.after is not None and first.after <= FLOOR
    assert 0.5 <= first.confidence < 0.999


@pytest.mark.parametrize("path", ["mlp", "self_attn", "input_layernorm", "mlp.up_proj"])
def test_noise_alone_is_attributed_to_nothing(path: str) -> None:
    drift = in_native_lane(drift_of("qwen3", path, lambda module: None), noise=0.05)
    causes = explain(drift)
    assert [cause.kind for cause in causes] == ["unknown"]
    assert "kernels" in causes[0].says, "float64 agrees, so the precision is suspected and not the mathematics"


def test_output_stored_in_fewer_bits() -> None:
    drift = drift_of("qwen3", "mlp", lambda module: None)
    found = [{"output": seen["output"].to(torch.float8_e4m3fn).double()} for seen in drift.source_output]
    tensor, before, step = worst(found, drift.source_output)
    narrowed = dataclasses.replace(
        drift,
        candidate_output=found,
        lane="native",
        floor=FLOOR,
        weights={},
        tensor=tensor,
        before=before,
        step=step,
        run_candidate=None,
    )
    first = explain(narrowed)[0]
    assert first.kind == "low-precision" and "4 significant bits" in first.says
