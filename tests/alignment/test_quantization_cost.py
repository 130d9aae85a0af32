"""What int8 activations cost stacked experts: against the Op that computes exactly that."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import porter
from porter.alignment.calls import Call
from porter.alignment.quantization_cost import _experts_cost
from porter.kernels.registry import default_registry
from porter.models.presets import shipped_directory


def test_the_cost_is_the_error_of_the_op_on_weights_that_int8_holds_exactly() -> None:
    generator = torch.Generator().manual_seed(11)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)

    experts, hidden_size, size, tokens = 5, 24, 13, 7
    gate_up, down = whole(experts, 2 * size, hidden_size), whole(experts, hidden_size, size)
    scales = torch.full((experts, 2 * size), 0.01), torch.full((experts, hidden_size), 0.01)
    hidden = torch.randn(tokens, hidden_size, generator=generator)
    index = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2, generator=generator)
    source: Any = SimpleNamespace(
        gate_up_proj=gate_up.double() * 0.01, down_proj=down.double() * 0.01, act_fn=torch.nn.functional.silu
    )
    op = default_registry().op("experts", "w8a8")
    quantized = op.oracle(hidden, index, weights, gate_up, scales[0], down, scales[1])
    plain = (
        default_registry()
        .op("experts", "standard")
        .oracle(hidden, index, weights, source.gate_up_proj, source.down_proj)
    )
    expected = float((quantized - plain).norm() / plain.norm())
    cost = _experts_cost(source, Call(0, 0, (hidden, index, weights), {}, None))
    assert cost == pytest.approx(expected, rel=0.02) and cost > 1e-3


def test_experts_of_other_devices_add_nothing() -> None:
    source: Any = SimpleNamespace(
        gate_up_proj=torch.ones(2, 4, 3), down_proj=torch.ones(2, 3, 2), act_fn=torch.nn.functional.silu
    )
    index = torch.tensor([[2], [7]])
    assert _experts_cost(source, Call(0, 0, (torch.ones(2, 3), index, torch.ones(2, 1)), {}, None)) == 0.0


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
def test_an_int8_port_is_compared_whole_with_a_bfloat16_golden(scheme: str, tmp_path: Path) -> None:
    """The source takes the dequantized weights, which are float32, into a replay in bfloat16."""
    directory = shipped_directory("tiny-qwen3")
    assert directory is not None
    source = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    golden = porter.capture(source, [[65, 110, 110, 101, 32]], tmp_path / "golden", new_tokens=2)
    port = porter.adapt(directory, scheme=scheme, output=tmp_path / "port")
    report = porter.align(golden, port.directory, resumption=None)
    assert report.verdict == "aligned"
    assert not [each for each in report.coverage.skipped if "replayed" in each.why]
