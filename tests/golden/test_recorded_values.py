"""Whatever modules take and return comes back from a golden, or is named as what does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_calls import recorded
from torch import Tensor, nn

from porter.errors import PorterError
from porter.golden.recorder import recording
from porter.golden.store import Golden

Build = Callable[..., nn.Module]
TOKENS = torch.tensor([[5, 1, 7, 2, 11]])


@dataclass
class Result:
    hidden: Tensor
    extra: dict[str, Any]


class Odd(nn.Module):
    """Every kind of argument and result."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return Result(torch.ones(2), {"args": arguments, "keywords": keywords})


def test_every_kind_of_value(tmp_path: Path) -> None:
    def function() -> None: ...

    arguments: tuple[Any, ...] = (
        None, True, 3, float("inf"), -0.5, "text", torch.bfloat16, torch.device("cpu"), [1, (torch.tensor(7),)],
        {"a": torch.empty(0, 3)}, torch.randn(2, 3).to_sparse(), torch.empty(2, device="meta"),
        torch.tensor([1 + 2j]).conj(), torch.randn(4).to(torch.float8_e4m3fn), torch.tensor([True, False]),
    )  # fmt: skip
    model = Odd()
    with recording(model, tmp_path / "golden"):
        model(*arguments, key=torch.tensor(1.5, dtype=torch.float64), what=function)
    golden = Golden.open(tmp_path / "golden")
    (call,) = golden.records
    nodes = call.inputs["dict"]["args"]["list"]
    values = [None if "opaque" in node else golden.value(node) for node in nodes]
    assert values[:8] == list(arguments[:8])
    assert values[8][0] == 1 and torch.equal(values[8][1][0], torch.tensor(7))
    assert values[9]["a"].shape == (0, 3)
    assert [place for place, node in enumerate(nodes) if "opaque" in node] == [10, 11]
    assert values[12].item() == 1 - 2j
    for place in (13, 14):
        assert values[place].dtype == arguments[place].dtype
        assert torch.equal(values[place].view(torch.uint8), arguments[place].view(torch.uint8))
    with pytest.raises(PorterError, match=r"no value for a builtins\.function"):
        golden.value(call.inputs["dict"]["kwargs"])
    assert golden.value(call.inputs["dict"]["kwargs"]["dict"]["key"]).item() == 1.5
    assert torch.equal(golden.value(call.outputs["dict"]["hidden"]), torch.ones(2))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 5).T,
        torch.randn(2, 4, 3, 5).transpose(1, 2),
        torch.randn(4, 1).expand(4, 6),
        torch.randn(2, 9, 4)[:, :5],
        torch.randn(7)[::2],
        torch.randn(10).as_strided((4, 4), (2, 1)),
        torch.randn(()),
        torch.randn(1, 7, 1),
    ],
)
def test_strides_are_restored(tensor: Tensor, tmp_path: Path) -> None:
    golden = recorded(nn.Identity(), tmp_path / "golden", (tensor,))
    value = golden.value(golden.records[-1].outputs)
    assert torch.equal(value, tensor)
    overlapping = tensor.shape == (4, 4)
    assert overlapping or value.stride() == tensor.stride()


def test_model_outputs_and_caches_come_back_as_such(qwen3: Build, tmp_path: Path) -> None:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    golden = recorded(qwen3(), tmp_path / "golden", (TOKENS,))
    output = golden.value(golden.records[-1].outputs, cache="the cache")
    assert isinstance(output, CausalLMOutputWithPast) and output.cache == "the cache"
    assert output.logits.shape == (1, 5, 61)
    assert golden.generated == [[int(output.logits[0, -1].argmax())]]
